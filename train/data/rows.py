"""From rows to token ids and masks, and the count of what came of them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.tokenizer import ChatTokenizer
from train.data.conversations import UnusableRow, read_conversation
from train.data.files import find_files, read_rows
from train.data.store import TokenStore
from train.data.turns import ChatOptions, Turns, encode_turns, find_turns

Encoded = tuple[np.ndarray, np.ndarray]
"""A document's ids and the places where its mask flips."""
Place = tuple[str, dict[str, Any]]
"""Where a row stands, and the row."""
STRADDLED = "a token straddles the start or the end of an answer, so serving has other ids"
REASONS = 20


@dataclasses.dataclass
class Counts:
    """What came of the rows.

    Attributes:
      skipped: rows by reason, as (number, place of the first).
    """

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    skipped: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def skip(self, place: str, reason: str) -> None:
        """Counts a row that is not used."""
        reason = reason if reason in self.skipped or len(self.skipped) < REASONS else "other reasons"
        number, first = self.skipped.get(reason, (0, place))
        self.skipped[reason] = number + 1, first

    def __str__(self) -> str:
        lines = [
            f"{self.rows} rows: {self.documents} documents, {self.tokens} tokens, {self.supervised} of them supervised"
        ]
        return "\n".join(lines + [f"skipped {n}: {why} (first: {at})" for why, (n, at) in self.skipped.items()])


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Turns rows into documents.

    Attributes:
      tokenizer: None suffices for rows of ids; vocab_size: ids must be below it.
    """

    tokenizer: ChatTokenizer | None
    vocab_size: int
    chat: ChatOptions

    def read(self, rows: Sequence[Place]) -> tuple[list[Encoded], list[tuple[str, str]]]:
        """The documents of conversations and of rows {"prompt": ids, "answer": ids}, in order.

        What gives none is returned second, as place and reason.

        Raises:
          ValueError: a row of neither shape, with its place.
        """
        found: list[tuple[str, Encoded | list[Turns]]] = []
        skipped = []
        for place, row in rows:
            try:
                found.append((place, self._find(row)))
            except UnusableRow as reason:
                skipped.append((place, str(reason)[:160]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{place} is not {{"messages": [...]}} or {{"prompt": [ids], "answer": [ids]}} ({error}); '
                    "the README shows the rows that are read."
                ) from error
        texts = [turns for _, each in found if isinstance(each, list) for turns in each]
        encoded = iter(encode_turns(self.tokenizer, texts) if self.tokenizer else ())
        documents: list[Encoded] = []
        for place, each in found:
            pairs = [next(encoded) for _ in each] if isinstance(each, list) else [each]
            whole = [(np.asarray(p[0], np.int32), np.asarray(p[1], np.int32)) for p in pairs if p is not None]
            if len(whole) < len(pairs):
                skipped.append((place, STRADDLED))
                continue
            for ids, _ in whole:
                if not (len(ids) and ids.min() >= 0 and ids.max() < self.vocab_size):
                    given = f"{ids.min()}..{ids.max()}" if len(ids) else "none"
                    raise ValueError(
                        f"{place} has the ids {given}, expected at least one, all within 0..{self.vocab_size - 1}, "
                        "which the target has."
                    )
            documents += whole
        return documents, skipped

    def _find(self, row: dict[str, Any]) -> Encoded | list[Turns]:
        if "answer" in row and not {"messages", "conversations"} & row.keys():
            tokens = np.asarray([*row["prompt"], *row["answer"]])
            if tokens.ndim != 1 or tokens.dtype.kind != "i" or abs(tokens).max() >= 2**31:
                raise TypeError("not lists of token ids")
            return tokens, np.array([len(row["prompt"])])
        conversation = read_conversation(row)
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer, which text needs")
        return find_turns(self.tokenizer, conversation, self.chat)


def read_documents(paths: Sequence[str | Path], reader: RowReader) -> TokenStore:
    """The documents of files, in memory: what `train.data.cache` keeps on disk.

    Raises:
      FileNotFoundError: no such file; ValueError: as `RowReader.read`.
    """
    return TokenStore.of_flips(reader.read(list(read_rows(find_files(paths))))[0])
