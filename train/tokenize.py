"""`python -m train.tokenize configs/RUN.py [--show N]`: tokenises a run's data and shows what is learnt of them."""

import dataclasses
import sys
from itertools import pairwise
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from dspark_jax.checkpoints.target import load_tokenizer
from dspark_jax.cli.mistakes import told_in_one_line
from dspark_jax.tokenizer import ChatTokenizer
from train.config import RunConfig, read_config
from train.data import PackedData, RowReader, cached_documents
from train.data.store import flips_of


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """Tokenise the data of a run, once; killed at any moment, it goes on where it stopped.

    Attributes:
      show: documents to print, what is supervised in them bold green between ⟦ and ⟧.
      first: the first of them.
    """

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    show: int = 0
    first: int = 0

    def main(self, console: Console | None = None) -> None:
        """Prints rows, tokens, what was skipped and how well rows are packed; then the documents to show.

        Raises:
          FileNotFoundError: a data file or the target is not there; ValueError: see `cached_documents`.
        """
        console = console or Console()
        run, tokenizer = self.run, load_tokenizer(self.run.target)
        reader = RowReader(tokenizer, tokenizer.num_tokens if tokenizer else 1 << 31, run.chat)
        documents, counts = cached_documents(run.tokens_directory, run.data, reader)
        data = PackedData(documents, run.seq_len, run.batch_size, run.seed)
        longer = int((documents.lengths > run.seq_len).sum())
        console.print(str(counts), markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"packed into rows of {run.seq_len} tokens, {data.efficiency:.1%} full: {data.steps_per_epoch} steps an "
            f"epoch; {longer} documents are longer than a row and cut; in {run.tokens_directory}",
            highlight=False,
            soft_wrap=True,
        )
        if not self.show:
            return
        if tokenizer is None:
            raise ValueError(f"--show needs a tokenizer, which {run.target} lacks.")
        for i in range(self.first, min(self.first + self.show, len(documents))):
            tokens, supervised = documents[i]
            console.rule(f"document {i}: {len(tokens)} tokens, {supervised.sum()} supervised")
            console.print(highlighted(tokenizer, tokens, supervised), soft_wrap=True)


def highlighted(tokenizer: ChatTokenizer, tokens, supervised) -> Text:
    """The text of a document [n] with its special tokens; what is supervised [n] is bold green between ⟦ and ⟧."""
    text = Text()
    for a, b in pairwise([0, *flips_of(supervised).tolist(), len(tokens)]):
        part = tokenizer.decode(tokens[a:b], skip_special_tokens=False)
        # Brackets too: what goes to a file has no colour.
        text.append(*((f"⟦{part}⟧", "bold green") if a < b and supervised[a] else (part, "dim")))
    return text


def main() -> None:
    """The command; users' mistakes end with one line on stderr and exit code 2."""
    with told_in_one_line("tokenize"):
        run, args = read_config("train.tokenize")
        tyro.cli(Tokenize, default=Tokenize(run), args=args, prog=f"python -m train.tokenize {sys.argv[1]}").main()


if __name__ == "__main__":
    main()
