"""Accepted lengths of a drafter while it is trained, by generating with it."""

from functools import partial
from pathlib import Path

import jax
import numpy as np

from dspark_jax.decoding.generate import Generator, Request, whole_chunks
from dspark_jax.drafters.kinds import AnyDrafter
from dspark_jax.evaluation import generate_many, read_prompts
from dspark_jax.models.decoder import Decoder
from dspark_jax.tokenizer import ChatTokenizer
from train.config import RunConfig


class Evaluation:
    """Greedy generation for all prompts of a run's `eval_data` as one batch; only the first compiles."""

    def __init__(self, run: RunConfig, target: Decoder, tokenizer: ChatTokenizer | None):
        """Reads the prompts.

        Raises:
          ValueError: the run has several processes, the target no tokenizer, a file no prompts or the name of another,
            or a prompt leaves no room in the target.
        """
        if jax.process_count() > 1:
            raise ValueError(
                f"eval_every generates in one process, this run has {jax.process_count()}; set it to 0, and evaluate "
                "exported drafters with `dspark evaluate`."
            )
        if tokenizer is None:
            raise ValueError(f"eval_every needs a tokenizer, which {run.target} lacks.")
        options = {} if run.chat.thinking is None else {"enable_thinking": run.chat.thinking}
        encode = partial(tokenizer.encode_chat, **options) if tokenizer.template else tokenizer.encode
        prompts = {Path(path).stem: list(map(encode, read_prompts(path, run.eval_prompts))) for path in run.eval_data}
        if len(prompts) < len(run.eval_data) or not all(prompts.values()):
            raise ValueError(f"eval_data must be files with prompts and of different names, got {run.eval_data}.")
        self.target, self.rounds = target, run.eval_tokens  # every round brings a token
        self.requests = [Request(ids, run.eval_tokens) for domain in prompts.values() for ids in domain]
        self.domains = {domain: len(of) for domain, of in prompts.items()}
        longest, positions = max(len(request.prompt) for request in self.requests), target.config.max_positions
        if longest >= positions:
            raise ValueError(f"a prompt of eval_data has {longest} tokens; the target takes at most {positions - 1}.")
        self.slots = whole_chunks(min(longest + run.eval_tokens, positions))

    def __call__(self, drafter: AnyDrafter) -> dict[str, float]:
        """Tokens a round, bonus included, by domain; a domain whose answers all end at once has none."""
        rows = len(self.requests)
        generator = Generator(self.target, drafter)
        found = dict(generate_many(generator, self.requests, rows=rows, slots=self.slots, rounds=self.rounds))
        lengths = iter([found[i].accept_lengths for i in range(rows)])
        by_domain = {domain: np.concatenate([next(lengths) for _ in range(n)]) for domain, n in self.domains.items()}
        return {domain: float(of.mean()) for domain, of in by_domain.items() if len(of)}
