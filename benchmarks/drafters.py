"""Drafters of every kind, trained on the same answers for as many steps at as many parameters, and compared:

python -m benchmarks.drafters --out runs/drafters --data answers.jsonl --prompts math=gsm8k.jsonl code=mbpp.jsonl \
    chat=mt-bench.jsonl

Answers are rows of `python -m train.regenerate`, prompts are rows of {"turns": [text, ...]} that were not trained on.
All kinds start from the target's last layers and differ in nothing but the drafter and its own loss: DFlash has a
third layer, and Eagle3 and MTP a wider MLP, where DSpark has its sequential head. Every kind is trained once a seed
(weights at random, order of documents, anchors) and drafts for the target's own greedy answers. A run that is killed
goes on where it was: drafters and results are kept in `out`. Where it is asked for, `dspark-int8` is DSpark trained on
hidden states kept in int8: `--kinds dspark dspark-int8` measures what those cost.
"""

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks.generate import machine
from dspark_jax.checkpoints.drafter import load_drafter
from dspark_jax.checkpoints.target import LoadedTarget, load_target
from dspark_jax.decoding.generate import Generator, Request, whole_chunks
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.drafters.mtp import MTP
from dspark_jax.evaluation import generate_many, read_prompts
from dspark_jax.models.decoder import Decoder
from dspark_jax.whole_file import whole_file
from train.config import RunConfig
from train.loop import Trainer
from train.losses import LossWeights

# On a run this short cross-entropy must lead: far from the target the total variation has almost no gradient.
DSPARK = RunConfig(out="", num_layers=2, warm_start=(28, 29), weights=LossWeights(ce=0.5))
ONE_LAYER = dataclasses.replace(
    DSPARK, num_layers=1, warm_start=(29,), markov_rank=0, weights=LossWeights.training_time_test()
)
KINDS = {
    "dspark": DSPARK,
    "dspark-rnn": dataclasses.replace(DSPARK, markov_head_type="rnn"),
    "dspark-int8": dataclasses.replace(DSPARK, features_dtype="int8"),
    "dflash": dataclasses.replace(
        DSPARK,
        num_layers=3,
        warm_start=(27, 28, 29),
        markov_rank=0,
        weights=LossWeights(ce=1.0, tv=0.0, confidence=0.0),
    ),
    "eagle3": dataclasses.replace(ONE_LAYER, kind="eagle3", intermediate_size=5400),
    "mtp": dataclasses.replace(ONE_LAYER, kind="mtp", tap_ids=(), block_size=1, intermediate_size=6100),
}


@dataclasses.dataclass(frozen=True)
class Answers:
    """Greedy answers and what the target made of them.

    Attributes:
      tokens: [b, t]; prompts, ends: [b] tokens of prompts, and of prompts and answers.
      hidden: [b, t, d] final states; taps: [b, t, m * d].
    """

    tokens: np.ndarray
    prompts: np.ndarray
    ends: np.ndarray
    hidden: np.ndarray
    taps: np.ndarray


@dataclasses.dataclass(frozen=True)
class CompareDrafters:
    """Train and compare drafters.

    Attributes:
      prompts: NAME=FILE for every domain.
      kinds, seeds: which to train.
      steps, batch_size, num_anchors, learning_rate: of every run; block_size: drafts of a round (MTP learns one).
      static: drafts of a round when MTP's one step is repeated, beside its own one.
      limit, max_tokens: prompts of a domain, new tokens of each; rows: prompts at a time.
    """

    out: Path
    data: tuple[str, ...]
    prompts: tuple[str, ...]
    kinds: tuple[str, ...] = tuple(kind for kind in KINDS if kind != "dspark-int8")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 300
    batch_size: int = 8
    num_anchors: int = 24
    learning_rate: float = 2e-3
    block_size: int = 5
    static: tuple[int, ...] = (3, 5)
    limit: int = 48
    max_tokens: int = 64
    rows: int = 48

    def run(self) -> None:
        """Trains and measures what is not there yet, and prints the table."""
        if unknown := set(self.kinds) - set(KINDS):
            raise ValueError(f"kinds {sorted(unknown)} are not known; expected some of {list(KINDS)}.")
        domains = dict(pair.split("=", 1) for pair in self.prompts)
        target = load_target("smollm2")
        results, answers = {}, None
        for seed in self.seeds:
            for kind in self.kinds:
                path = self.out / f"{kind}-{seed}.json"
                if not path.is_file():
                    answers = answers or {name: self.answers(target, file) for name, file in domains.items()}
                    measured = self.measured(target, kind, seed, answers)
                    with whole_file(path) as work:
                        work.write_text(json.dumps(measured))
                for name, found in json.loads(path.read_text()).items():
                    results.setdefault(name, []).append(found)
        self.show(results, list(domains))

    def measured(self, target: LoadedTarget, kind: str, seed: int, answers: dict[str, Answers]) -> dict:
        """Trains a drafter; for each way to use it, its parameters and [tokens, rounds] of every prompt by domain."""
        base = KINDS[kind]
        run = dataclasses.replace(
            base, out=f"{self.out}/{kind}-{seed}", tokens=f"{self.out}/tokens", data=self.data, steps=self.steps,
            features=f"{self.out}/features-{len(base.tap_ids)}-{base.features_dtype}", batch_size=self.batch_size,
            num_anchors=self.num_anchors, learning_rate=self.learning_rate, seed=seed, log_every=20,
            block_size=1 if kind == "mtp" else self.block_size,
        )  # fmt: skip
        trainer = Trainer(run, target.model, target.tokenizer)
        trainer.train()
        trainer.export()
        drafter = load_drafter(f"{run.out}/drafter", target=target.model)
        uses = {kind: drafter}
        if isinstance(drafter, MTP):
            uses = {"mtp-1": drafter, **{f"mtp-{n} (static)": drafter.repeated(n) for n in self.static}}
        return {name: self.accepted(target, use, answers) for name, use in uses.items()}

    def answers(self, target: LoadedTarget, path: str) -> Answers:
        """The target's greedy answers to the prompts of a file, with its hidden states."""
        assert target.tokenizer is not None
        prompts = [target.tokenizer.encode_chat(text) for text in read_prompts(path, self.limit)]
        slots = whole_chunks(max(map(len, prompts)) + self.max_tokens)
        found = dict(generate_many(
            Generator(target.model), [Request(ids, self.max_tokens) for ids in prompts], rows=self.rows, slots=slots
        ))  # fmt: skip
        rows = [ids + found[i].tokens for i, ids in enumerate(prompts)]
        tokens = np.zeros((len(rows), slots + self.block_size + 1), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        run = jax.jit(lambda model, tokens: self.states(model, tokens))
        states = [run(target.model, tokens[i : i + 8]) for i in range(0, len(tokens), 8)]
        hidden, taps = (np.concatenate(parts) for parts in zip(*jax.device_get(states), strict=True))
        return Answers(tokens, np.array([*map(len, prompts)]), np.array([*map(len, rows)]), hidden, taps)

    def states(self, model: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Final hidden states and taps of token rows [b, t]."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, taps, _ = model(tokens, positions, model.create_cache(*tokens.shape), DSPARK.tap_ids)
        return hidden, taps

    def accepted(self, target: LoadedTarget, drafter, answers: dict[str, Answers]) -> dict:
        """Tokens and rounds of greedy answers, drafted for as in generation."""
        found, reached, seconds = {}, np.zeros((2, drafter.config.block_size), int), []
        for domain, known in answers.items():
            read = known.hidden if drafter.config.reads_final_hidden else known.taps
            rounds, counts = replay(drafter, target.model, known.tokens, read, known.prompts, known.ends)
            emitted = (known.ends - known.prompts - 1).tolist()
            found[domain] = [[n, of] for n, of in zip(emitted, rounds.tolist(), strict=True)]
            reached += np.asarray(counts)
        graph, state = nnx.split((drafter, target.model))

        @jax.jit
        def propose(state, *rest):
            drafter, target = nnx.merge(graph, state)
            return drafter.propose(target, *rest)[0]

        cache, at = drafter.create_cache(1, 256), jnp.full(1, 200)
        keys = jnp.broadcast_to(jax.random.key(0), (1, drafter.config.block_size))
        arguments = drafter.draft_head(target.model), cache, jnp.ones(1, int), at, Sampling.create(1), keys
        for _ in range(12):
            start = time.perf_counter()
            jax.block_until_ready(propose(state, *arguments))
            seconds.append(time.perf_counter() - start)
        size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(drafter, nnx.Param)))
        conditional = (reached[1] / np.maximum(reached[0], 1)).tolist()
        block = float(np.median(seconds[2:]))
        return {"parameters": size, "domains": found, "conditional": conditional, "seconds": block}

    def show(self, results: dict[str, list[dict]], domains: list[str]) -> None:
        """Prints accepted lengths with intervals, and each kind's macro-average against the first kind's."""
        table = Table(title=f"tokens a round, greedy, {len(self.seeds)} seeds x {self.limit} prompts a domain, 95 %")
        first = None
        columns = "macro-average", "first over this", "conditional acceptance by position", "ms a block"
        for column in ("drafter", "parameters", *domains, *columns):
            table.add_column(column)
        for name, runs in results.items():
            # [seeds, domains, prompts, (tokens, rounds)]
            counts = [np.array([run["domains"][domain] for run in runs], float) for domain in domains]
            resampled = np.stack([resample(c) for c in counts])
            macro, mine = resampled.mean(0), [taus(c) for c in counts]
            first = (np.mean(mine), macro) if first is None else first
            cells = [interval(tau, draws) for tau, draws in zip(mine, resampled, strict=True)]
            ratio = interval(first[0] / np.mean(mine), first[1] / macro)
            by_position = " ".join(f"{x:.2f}" for x in np.mean([run["conditional"] for run in runs], axis=0))
            block = f"{1e3 * np.median([run['seconds'] for run in runs]):.1f}"
            size, average = f"{runs[0]['parameters'] / 1e6:.1f} M", interval(np.mean(mine), macro)
            table.add_row(name, size, *cells, average, ratio, by_position, block)
        console = Console(width=200)
        console.print(table)
        console.print(
            f"{machine()}; {self.steps} steps of {self.batch_size} rows of 512 tokens, "
            f"{self.num_anchors} blocks a row; intervals over seeds and prompts, drawn anew together for all drafters."
        )


@nnx.jit
def replay(
    drafter, target: Decoder, tokens: jax.Array, read: jax.Array, prompts: jax.Array, ends: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What greedy generation takes with a drafter, for answers that are known: the target need not run.

    Args:
      tokens: [b, t] prompts [b] long with their answers, up to `ends` [b]; read: [b, t, m * d] what the drafter reads.

    Returns:
      Rounds [b], and [2, g] how often a draft was reached and how often it was accepted.
    """
    (b, t), g = tokens.shape, drafter.config.block_size
    head, embedded = drafter.draft_head(target), target.embed(tokens)
    at = jnp.broadcast_to(jnp.arange(t), tokens.shape)
    cache = drafter.create_cache(b, t + g + 2)
    cache = drafter.extend(cache, read, jnp.where(at < prompts[:, None], at, -1), embedded)
    sampling, keys = Sampling.create(b), jnp.broadcast_to(jax.random.key(0), (b, g))

    def body(carry):
        position, rounds, counts, cache = carry
        pick = lambda x: jnp.take_along_axis(x, block.reshape(b, -1, *(1,) * (x.ndim - 2)), axis=1)  # noqa: E731
        anchor = jnp.take_along_axis(tokens, position[:, None], axis=1)[:, 0]
        proposal, cache = drafter.propose(target, head, cache, anchor, position, sampling, keys)
        block = jnp.minimum(position[:, None] + jnp.arange(g + 1), t - 1)
        good = jnp.cumprod(proposal.tokens == pick(tokens)[:, 1:], axis=1)
        room = jnp.maximum(ends - position - 2, 0)
        accepted = jnp.minimum(jnp.sum(good, axis=1), room)
        running, k = position < ends - 1, jnp.arange(g)
        tried = running[:, None] & (k <= accepted[:, None]) & (k < room[:, None])
        counts = counts + jnp.stack([tried, tried & (k < accepted[:, None])]).sum(axis=1)
        seen = running[:, None] & (jnp.arange(g + 1) <= accepted[:, None])
        cache = drafter.extend(cache, pick(read), jnp.where(seen, block, -1), pick(embedded))
        return position + running * (accepted + 1), rounds + running, counts, cache

    start = prompts, jnp.zeros_like(prompts), jnp.zeros((2, g), int), cache
    return jax.lax.while_loop(lambda c: jnp.any(c[0] < ends - 1), body, start)[1:3]


def taus(counts: np.ndarray) -> float:
    """Tokens a round of [..., (tokens, rounds)]."""
    return counts[..., 0].sum() / counts[..., 1].sum()


def resample(counts: np.ndarray, draws: int = 2000) -> np.ndarray:
    """Tokens a round of [seeds, prompts, 2], [draws] times with seeds and prompts drawn anew; the same for all."""
    random = np.random.default_rng(0)
    seeds, prompts, _ = counts.shape
    picked = counts[random.integers(seeds, size=(draws, seeds, 1)), random.integers(prompts, size=(draws, 1, prompts))]
    return picked[..., 0].sum((1, 2)) / picked[..., 1].sum((1, 2))


def interval(value: float, draws: np.ndarray) -> str:
    """A figure and its 95 % interval."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    tyro.cli(CompareDrafters, prog="python -m benchmarks.drafters").run()
