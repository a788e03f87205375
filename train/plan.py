"""`python -m train.plan configs/RUN.py --topology v5e:4x4`: compiles a run's step for a TPU slice that is not there.

Needs libtpu (`pip install 'jax[tpu]'`), which compiles without hardware, and of the target only its config.json.
"""

import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from dspark_jax.checkpoints.target import load_target_config
from dspark_jax.chips import CHIPS, GIB, Chip, peak_bytes, topology
from dspark_jax.cli.mistakes import told_in_one_line
from dspark_jax.drafters.kinds import build_drafter
from dspark_jax.hlo import Counts, count
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.decoder import Decoder, check_taps
from dspark_jax.sharding import ROWS, laid_out, make_mesh, row_shards, shardings
from train.attention import choose_attention
from train.config import RunConfig, read_config
from train.flops import model_flops, splash_cost
from train.loop import check_rows, optimizer, step_config, trained
from train.step import TokenBatch, TrainState, jit_step


def step_shapes(run: RunConfig, target: TargetConfig, mesh: Mesh) -> tuple[Any, tuple]:
    """A run's jitted step, and the shapes, as they lie on the mesh, of what it is called with."""
    drafter = nnx.eval_shape(lambda: build_drafter(run.drafter(target), rngs=nnx.Rngs(0)))
    graph, params, frozen = nnx.split(drafter, trained(drafter, run.train_only), ...)
    decoder = nnx.eval_shape(lambda: Decoder(target, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    target_graph, target_params = nnx.split(decoder)
    tx = optimizer(run)
    updates: Any = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(updates, params, jax.eval_shape(tx.init, params))
    rows = NamedSharding(mesh, P(ROWS))

    def lay(tree):
        return laid_out(tree, shardings(tree, mesh))

    def given(dtype, *width: int):
        return jax.ShapeDtypeStruct((run.batch_size, run.seq_len, *width), dtype, sharding=rows)

    d, f32 = target.hidden_size, jnp.float32
    features = (given(jnp.bfloat16, d), given(jnp.bfloat16, len(run.tap_ids) * d), given(f32))
    tokens = given(jnp.int32), given(jnp.bool_), given(jnp.int32), given(jnp.int32)
    batch: Any = TokenBatch[Any](*tokens, features if run.reads_features else None)
    attention = choose_attention(run, target, jnp.bfloat16, mesh)
    step = jit_step(step_config(run, graph, target_graph, tx, attention), shardings(state, mesh), mesh)
    return step, (lay(state), lay(frozen), lay(target_params), batch)


def logits_at_once(run: RunConfig, target: TargetConfig, mesh: Mesh, counts: Counts) -> int:
    """Positions of the largest array of logits that a program holds on a device."""
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    vocabularies = {n // split for n in (target.vocab_size, run.drafter(target).draft_rows) for split in (1, tensor)}
    # Embedding, head and the sequential head's two tables, whole, split, or in the pieces they were gathered from.
    splits = (1, fsdp, tensor, fsdp * tensor)
    tables = {n // split for n in (target.hidden_size, run.markov_rank) for split in splits}
    shapes = {array.shape for array in counts.arrays}
    rows = {math.prod(shape) // v for shape in shapes for v in vocabularies & {*shape}}
    return max(rows - tables, default=0)


def takes_memory(run: RunConfig, target: TargetConfig, mesh: Mesh, arguments: int) -> list[tuple[float, str]]:
    """What takes memory on a device, in bytes, roughly, the largest first, and what makes it less."""
    drafter, tensor, rows = run.drafter(target), mesh.shape["tensor"], run.batch_size // row_shards(mesh)
    heads, t, blocks = target.num_heads // tensor, run.seq_len, run.num_anchors * run.block_size
    queries, anchors = run.query_chunk or t, run.attention_chunk or run.num_anchors
    size = 2 if run.compute_dtype == "bfloat16" else 4
    passes = drafter.num_layers if run.kind == "dspark" else run.block_size
    inner = 8 * target.hidden_size + 4 * drafter.intermediate_size // tensor
    plain = choose_attention(run, target, jnp.bfloat16, mesh) == "plain"
    scores = plain * (1 if run.remat or run.attention_chunk else passes)
    per_block = run.block_size if run.kind == "dspark" else 1
    found = [
        (6 * plain * rows * heads * queries * t, f"scores of {queries} of the target's queries: lower query_chunk"),
        (
            6 * scores * rows * heads * anchors * per_block * t,
            f"scores of {anchors} anchors: lower attention_chunk",
        ),
        (16 * run.chunk * drafter.draft_rows // tensor, f"logits of {run.chunk} positions: lower chunk"),
        (0 if run.remat else size * drafter.num_layers * rows * blocks * inner, "the drafter's activations: set remat"),
        (
            2 * rows * (t * (len(run.tap_ids) + 8) + blocks * (passes + 4)) * target.hidden_size,
            f"states of {rows} rows: lower batch_size" if rows > 1 else "states of a row: raise tensor of mesh",
        ),
        (arguments, "parameters, optimizer and target: raise fsdp (or tensor) of mesh"),
    ]
    return sorted([entry for entry in found if entry[0]], reverse=True)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Compile the step of a run for a TPU slice, and tell what it needs.

    Attributes:
      topology: chip and how many of them along each axis of the slice, such as v5e:4x4 or v5p:2x2x2.
      effort: of XLA, -1 to 1. At -1 it compiles several times faster; products stay, bytes accessed are more than a
        run's, and temporaries differ.
      hlo: a file to write the compiled program to.
    """

    topology: str = "v5e:4x4"
    effort: float = 0.0
    hlo: str = ""

    def main(self, run: RunConfig, console: Console) -> bool:
        """Prints the table, and returns whether the step fits.

        Raises:
          FileNotFoundError: no such target; ValueError: no such slice, or a mesh or batch that does not fit it.
        """
        target, devices = load_target_config(run.target), topology(self.topology)
        mesh, chip = make_mesh(run.mesh, devices), CHIPS[self.topology.split(":")[0]]
        check_rows(run, mesh)
        if run.kind != "mtp":
            check_taps(run.tap_ids, target.num_layers)
        shape = " x ".join(f"{n} {axis}" for axis, n in mesh.shape.items())
        console.print(
            f"{run.kind} for {run.target} on {self.topology}, {mesh.size} chips as {shape}, "
            f"{choose_attention(run, target, jnp.bfloat16, mesh)} attention",
            highlight=False,
        )
        jax.config.update("jax_exec_time_optimization_effort", self.effort)
        jax.config.update("jax_memory_fitting_effort", self.effort)
        started = time.perf_counter()
        with jax.set_mesh(mesh):
            step, arguments = step_shapes(run, target, mesh)
            try:
                compiled = step.lower(*arguments).compile()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                console.print(
                    f"does not fit: {str(error).splitlines()[0]} What takes memory, and what to turn:", markup=False
                )
                held = sum(
                    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arguments)
                )
                for size, what in takes_memory(run, target, mesh, held):
                    console.print(f"  {size / GIB:6.2f} GiB  {what}", highlight=False)
                return False
        text = compiled.as_text()
        if self.hlo:
            Path(self.hlo).write_text(text)
        counts = count(text)
        for (name, read), times in counts.kernels.items():
            flops, moved = splash_cost(name, read, run.seq_len)
            counts.flops += times * flops
            counts.bytes += times * moved
        console.print(table(run, target, mesh, chip, compiled.memory_analysis(), counts))
        console.print(f"in {time.perf_counter() - started:.0f} s, at XLA's effort {self.effort:g}", highlight=False)
        return True


def table(run: RunConfig, target: TargetConfig, mesh: Mesh, chip: Chip, memory: Any, counts: Counts) -> Table:
    """What a compiled step needs on a device, a row each."""
    asked = sum(model_flops(run, target).values()) / mesh.size
    times = {
        "products": counts.flops / chip.flops,
        "HBM": counts.bytes / chip.bandwidth,
        "links": counts.wire / chip.links,
    }
    limit = max(times, key=lambda name: times[name])
    seconds = times[limit]
    most, forbidden = logits_at_once(run, target, mesh, counts), run.num_anchors * run.block_size
    rows = {
        "arguments": f"{memory.argument_size_in_bytes / GIB:.2f} GiB: drafter, optimizer, target, batch",
        "temporaries": f"{memory.temp_size_in_bytes / GIB:.2f} GiB",
        "peak": f"{peak_bytes(memory) / GIB:.2f} GiB of {chip.memory / GIB:.0f}: fits",
        "logits": f"of {most} positions at once; anchors x g are {forbidden}: \\[anchors, g, v] is "
        + ("absent" if most < forbidden else "PRESENT, lower chunk"),
        "products": f"{counts.flops / 1e12:.2f} TFLOP, {counts.flops / asked:.3f} x the {asked / 1e12:.2f} asked for",
        "bytes accessed": f"{counts.bytes / 1e9:.1f} GB",
        **{f"{n} {kind}": f"{counts.sizes[kind] / 1e9:.2f} GB" for kind, n in sorted(counts.collectives.items())},
        "time at best": ", ".join(f"{name} {1e3 * t:.0f} ms" for name, t in times.items()),
        "step at best": f"{1e3 * seconds:.0f} ms, {run.batch_size * run.seq_len / seconds:,.0f} tokens/s",
        "MFU at best": f"{asked / seconds / chip.flops:.0%}, bound by {limit}",
    }
    shown = Table(show_header=False)
    for row in rows.items():
        shown.add_row(*row)
    return shown


def main() -> None:
    """The command; exit code 1 where the step does not fit, 2 on a user's mistake."""
    with told_in_one_line("plan"):
        run, args = read_config("train.plan")
        kinds = tuple[tyro.conf.OmitArgPrefixes[RunConfig], tyro.conf.OmitArgPrefixes[Plan]]
        run, plan = tyro.cli(kinds, default=(run, Plan()), args=args, prog=f"python -m train.plan {sys.argv[1]}")
        sys.exit(0 if plan.main(run, Console()) else 1)


if __name__ == "__main__":
    main()
