"""The run: data in, checkpoints and a drafter out. Killed at any moment, it resumes exactly."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.checkpoints.drafter import load_drafter, save_drafter
from dspark_jax.checkpoints.target import load_target
from dspark_jax.drafters.kinds import AnyDrafter, AnyDrafterConfig, build_drafter
from dspark_jax.drafters.vocabulary import DraftIds
from dspark_jax.models.decoder import Decoder, check_taps
from dspark_jax.sharding import ROWS, make_mesh, placer, row_shards, shardings, spread
from dspark_jax.tokenizer import ChatTokenizer
from dspark_jax.whole_file import whole_file
from train.attention import choose_attention
from train.config import RunConfig
from train.data import PackedData, RowReader, TokenStore, cached_documents, frequent_tokens, pack, read_ahead
from train.distributed import is_main
from train.evaluation import Evaluation
from train.optimizer import optimizer
from train.packed_attention import Attention
from train.report import Report
from train.step import StepConfig, TokenBatch, TrainState, jit_step
from train.target_pass import cached_features
from train.warm_start import warm_start


def step_config(
    run: RunConfig, graph: Any, target_graph: Any, tx: optax.GradientTransformation, attention: Attention
) -> StepConfig:
    """The static half of a run's step."""
    return StepConfig(
        graph, target_graph, tx, run.weights, run.tap_ids, run.num_anchors, run.chunk, run.share_targets, run.seed,
        accumulate=run.accumulate, attention_chunk=run.attention_chunk, query_chunk=run.query_chunk,
        remat=run.remat, compute_dtype=run.compute_dtype, scan_layers=run.scan_layers, attention=attention,
    )  # fmt: skip


def check_rows(run: RunConfig, mesh: Mesh) -> int:
    """Devices that share the rows of a run's batches; ValueError where those do not divide over them."""
    if run.batch_size % ((shards := row_shards(mesh)) * run.accumulate):
        raise ValueError(
            f"batch_size {run.batch_size} does not divide into {run.accumulate} micro-batches over the {shards} "
            f"devices of data and fsdp; mesh is {dict(mesh.shape)}."
        )
    return shards


def _same_shape(drafter: AnyDrafter, config: AnyDrafterConfig, path: str) -> AnyDrafter:
    """A loaded drafter, if it is of the kind and shape the run asks for; its draft vocabulary may be smaller."""
    free = {"num_anchors", "step_decay"}
    if drafter.draft_ids is not None and drafter.config.draft_rows < config.draft_rows:
        free.add("draft_vocab_size")
    theirs, ours = ({"kind": type(c).__name__, **dataclasses.asdict(c)} for c in (drafter.config, config))
    if changed := {k: (theirs.get(k), ours[k]) for k in ours if k not in free and theirs.get(k) != ours[k]}:
        raise ValueError(
            f"the initial drafter {path} is of another shape than the run (field: (there, here)): {changed}. "
            "Give the run the drafter's own."
        )
    return drafter


def _grown(drafter: AnyDrafter, config: AnyDrafterConfig, documents: TokenStore) -> AnyDrafter:
    """The drafter with the config's draft vocabulary: its own tokens, and the most frequent of those it lacks.

    What it computes for its own tokens stays; the bias of new ones starts at zero.
    """
    have = np.asarray(drafter.rows).tolist()
    ids = frequent_tokens(documents, config.draft_rows, have)
    grown = build_drafter(config, dtype=drafter.dtype, rngs=nnx.Rngs(0))
    if drafter.markov and grown.markov:
        old = drafter.markov.w2[...]
        drafter.markov.w2 = nnx.Param(
            jnp.zeros(grown.markov.w2.shape, old.dtype).at[np.searchsorted(ids, have)].set(old)
        )
    drafter.draft_ids = None if grown.draft_ids is None else DraftIds(jnp.asarray(ids))
    nnx.update(grown, nnx.state(drafter))
    return grown


def trained(drafter: AnyDrafter, only: tuple[str, ...]) -> Callable[[tuple, nnx.Variable], bool]:
    """Which variables a run trains: all parameters, or those of the modules named."""
    modules = {path[0] for path, _ in nnx.to_flat_state(nnx.state(drafter, nnx.Param))}
    if unknown := sorted(set(only) - modules):
        raise ValueError(f"train_only names {unknown}; this drafter has {sorted(modules)}.")
    return lambda path, variable: isinstance(variable, nnx.Param) and (not only or path[0] in only)


def _with_defaults(settings: dict, known: dict) -> dict:
    """Settings of a run, with those of `known` that are newer than it at their defaults."""
    defaults = json.loads(json.dumps(dataclasses.asdict(RunConfig(out=""))))
    weights = {**defaults["weights"], **settings.get("weights", {})}
    return {**{k: v for k, v in defaults.items() if k in known}, **settings, "weights": weights}


class Trainer:
    """Owns the state of one run."""

    def __init__(
        self,
        run: RunConfig,
        target: Decoder | None = None,
        tokenizer: ChatTokenizer | None = None,
        devices: Sequence[Any] | None = None,
    ):
        """Builds models and data, and resumes from the last checkpoint in `run.out` if there is one.

        Args:
          target: in place of `run.target`, and its tokenizer, which rows of ids do not need.
          devices: of the mesh; default all.

        Raises:
          ValueError: a checkpoint of a run with another drafter, other data or another order stands in `run.out`, or
            a damaged one.
        """
        self.run = run
        self.out = Path(run.out).absolute()
        self.mesh = make_mesh(run.mesh, devices)
        self._row_sharding, self.shards = NamedSharding(self.mesh, P(ROWS)), check_rows(run, self.mesh)
        if target is None:
            loaded = load_target(run.target, place=placer(self.mesh))
            target, tokenizer = loaded.model, loaded.tokenizer
        self.target = target
        if run.kind != "mtp":
            check_taps(run.tap_ids, self.target.config.num_layers)
        self._evaluation = Evaluation(run, self.target, tokenizer) if run.eval_every else None
        reader = RowReader(tokenizer, target.config.num_tokens, run.chat)
        documents, self.counts = cached_documents(run.tokens_directory, run.data, reader)
        self.data = PackedData(documents, run.seq_len, run.batch_size, run.seed)
        self.out.mkdir(parents=True, exist_ok=True)
        policies = ocp.training.preservation_policies
        self.checkpoints = ocp.training.Checkpointer(
            str(self.out / "checkpoints"),
            preservation_policy=policies.LatestN(2),  # pyright: ignore[reportArgumentType]
            cleanup_tmp_directories=True,
        )
        drafter = self._build(documents)
        graph, params, frozen = nnx.split(drafter, trained(drafter, run.train_only), ...)
        params, self._frozen = (self._put(tree) for tree in (params, frozen))
        self._check_same_run()
        target_graph, self._target = nnx.split(self.target)
        self._target, self._features = self._put(self._target), None
        if run.reads_features:
            self.target = nnx.merge(target_graph, self._target)
            self._features = cached_features(run, self.target, documents, self.mesh)
            if not run.eval_every:
                # Steps need its embedding and head alone.
                self.target.layers = None  # pyright: ignore[reportAttributeAccessIssue]
                target_graph, self._target = nnx.split(self.target)
        tx = optimizer(run)
        attention = choose_attention(run, self.target.config, self.target.dtype, self.mesh)
        self.config = step_config(run, graph, target_graph, tx, attention)
        lie = shardings(jax.eval_shape(tx.init, params), self.mesh)
        self.state = TrainState(self._put(np.zeros((), np.int32)), params, jax.jit(tx.init, out_shardings=lie)(params))
        everywhere = NamedSharding(self.mesh, P())
        lie = shardings(self.state, self.mesh)
        self._step = jit_step(self.config, lie, self.mesh)
        self._gather = jax.jit(lambda tree: tree, out_shardings=everywhere)
        if self.checkpoints.latest is not None:
            self.state = self._load(self.checkpoints.latest.step)

    @property
    def step(self) -> int:
        """Updates done."""
        return int(self.state.step)

    @property
    def drafter(self) -> AnyDrafter:
        """The drafter as trained so far: its average, if the run keeps one."""
        params = self.state.optimizer[-1].params if self.run.ema else self.state.params
        return nnx.merge(self.config.graph, *self._gather((params, self._frozen)))

    def train(self, until: int | None = None, stop: Callable[[int], bool] = lambda step: False) -> dict[str, float]:
        """Runs up to update `until` (default: all), checkpointing on the way; returns the last metrics.

        Metrics are read one step late, so the device never waits for the host, except before a checkpoint.

        Args:
          stop: asked after each update, by its number, whether to save a checkpoint and return.

        Raises:
          FloatingPointError: the loss or its gradient is not finite; the last checkpoint stays, and the batch is kept.
        """
        run, until = self.run, self.run.steps if until is None else until
        pending, last, first = None, {}, self.step
        if first >= until:
            return last
        with (
            closing(read_ahead(self._parts, first, until)) as batches,
            Report(run, self.target.config, first, self.mesh.size) as report,
            jax.set_mesh(self.mesh),
        ):
            for step in range(first + 1, until + 1):
                parts = next(batches)
                self.state, metrics = self._step(self.state, self._frozen, self._target, self._lay(parts))
                if pending is not None:
                    last = self._read(report, *pending)
                pending, stopped = (step, parts, metrics), stop(step)
                save = step % run.checkpoint_every == 0 or step == until or stopped
                evaluate = self._evaluation if run.eval_every and step % run.eval_every == 0 and not stopped else None
                if save or evaluate:
                    # Read first, so that a checkpoint is never of a run that has broken down.
                    last, pending = self._read(report, *pending), None
                    with report.paused():
                        if evaluate:
                            report.evaluation(step, evaluate(self.drafter))
                        if save:
                            self.checkpoints.save(step, self.state)
                if stopped:
                    break
        return last

    def export(self, directory: str | Path | None = None, dtype=jnp.bfloat16) -> Path:
        """Writes the drafter in the released layout, without the target's tables. All processes must call it."""
        path, drafter = Path(directory or self.out / "drafter"), self.drafter
        return save_drafter(path, drafter, dtype=dtype) if is_main() else path

    def _put(self, tree):
        """Arrays, the same in every process, onto the mesh."""
        return jax.tree.map(spread, tree, shardings(tree, self.mesh))

    def _batch(self, step: int) -> TokenBatch:
        """The batch of an update, on the mesh."""
        return self._lay(self._parts(step))

    def _parts(self, step: int) -> dict[int, TokenBatch]:
        """What devices of this process hold of an update's batch: by number, of as many parts as devices share rows."""
        lies = self._row_sharding.addressable_devices_indices_map((self.run.batch_size,))
        return {part: self._part(step, part) for part in {self._number(at) for at in lies.values()}}

    def _part(self, step: int, part: int) -> TokenBatch:
        pieces, t = self.data.pieces(step, part, self.shards), self.run.seq_len
        batch = pack(self.data.documents, pieces, t)
        return batch if self._features is None else dataclasses.replace(batch, features=self._features.rows(pieces, t))

    def _number(self, at: tuple[slice, ...] | None) -> int:
        """The part that stands at these indices of a batch."""
        assert at is not None
        return (at[0].start or 0) * self.shards // self.run.batch_size

    def _lay(self, parts: dict[int, TokenBatch]) -> TokenBatch:
        """The global batch that the parts of all processes make together."""
        leaves = {number: jax.tree.leaves(part) for number, part in parts.items()}

        def array(i: int, like: np.ndarray) -> jax.Array:
            shape = (self.run.batch_size, *like.shape[1:])
            return jax.make_array_from_callback(shape, self._row_sharding, lambda at: leaves[self._number(at)][i])

        like, structure = jax.tree.flatten(next(iter(parts.values())))
        return jax.tree.unflatten(structure, [array(i, x) for i, x in enumerate(like)])

    def _build(self, documents) -> AnyDrafter:
        run = self.run
        config = run.drafter(self.target.config)
        if run.initial_drafter:
            drafter = _same_shape(load_drafter(run.initial_drafter, target=self.target), config, run.initial_drafter)
            same = drafter.config.draft_rows == config.draft_rows
            return drafter if same else _grown(drafter, config, documents)
        drafter = build_drafter(config, rngs=nnx.Rngs(run.seed))
        if drafter.draft_ids is not None:
            ids = frequent_tokens(documents, run.draft_vocab_size, self.target.config.stop_ids)
            drafter.draft_ids[...] = jnp.asarray(ids)
        if run.warm_start:
            warm_start(drafter, self.target, run.warm_start, jnp.asarray(self.data.batch(0).tokens[:1]))
        return drafter

    def _load(self, step: int) -> TrainState:
        try:
            return self.checkpoints.load(step, self.state)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(
                f"the checkpoint {self.out / 'checkpoints' / str(step)} cannot be read: it is damaged. Delete it, and "
                "the run goes on from the one before, or from its start."
            ) from error

    def _check_same_run(self) -> None:
        """What the state means must not change under it; how long it runs and where it writes may."""
        free = {"out", "steps", "checkpoint_every", "log_every", "chunk", "share_targets", "mesh", "accumulate"}
        free |= {"cache_features", "features", "features_dtype"}
        free |= {"eval_every", "eval_data", "eval_prompts", "eval_tokens"}
        free |= {"attention", "attention_chunk", "query_chunk", "remat", "scan_layers"}
        free |= {"data", "tokens", "chat"}  # the checksum tells what came of them
        mine = {k: v for k, v in dataclasses.asdict(self.run).items() if k not in free}
        mine = json.loads(json.dumps({**mine, "documents": len(self.data.documents), "crc": self.data.crc}))
        path = self.out / "run.json"
        if self.checkpoints.latest is None or not path.is_file():
            if not is_main():
                return
            path.write_text(json.dumps(mine, indent=1) + "\n")
            return
        theirs = _with_defaults(json.loads(path.read_text()), mine)
        if changed := {
            k: (theirs.get(k), mine.get(k)) for k in theirs.keys() | mine.keys() if theirs.get(k) != mine.get(k)
        }:
            raise ValueError(
                f"{self.out} holds a run with other settings (field: (there, here)): {changed}. "
                "Resume with the same settings, or choose another `out`."
            )

    def _read(self, report: Report, step: int, parts: dict[int, TokenBatch], metrics: dict[str, jax.Array]) -> dict:
        """The metrics of an update, told; `parts` is the batch it was made from."""
        values = {k: v.tolist() for k, v in jax.device_get(metrics).items()}
        if not np.isfinite([values["loss"], values["gradient_norm"]]).all():
            raise FloatingPointError(
                f"the loss of step {step} is {values['loss']} and its gradient's norm {values['gradient_norm']}; its "
                f"batch is in {self._keep_batch(step, parts)}, the last checkpoint is untouched."
            )
        report.step(step, values)
        return values

    def _keep_batch(self, step: int, parts: dict[int, TokenBatch]) -> Path:
        """Writes what this process holds of an update's batch: the fields of `TokenBatch`, features in float32."""
        process = f"_process_{jax.process_index()}" if jax.process_count() > 1 else ""
        path = self.out / f"bad_batch_{step}{process}.npz"
        batch = jax.tree.map(lambda *rows: np.concatenate(rows), *(parts[number] for number in sorted(parts)))
        arrays = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "features"}
        if batch.features is not None:
            names = ("hidden", "taps", "normalizers")
            arrays |= {name: x.astype(np.float32) for name, x in zip(names, batch.features, strict=True)}
        with whole_file(path) as work, work.open("wb") as file:
            np.savez(file, step=step, **arrays)
        return path
