"""A training step of DSpark against one of DeepSpec, the PyTorch reference, on the CPU in float32:

python -m benchmarks.reference_step --reference PATH

PATH is a checkout of github.com/deepseek-ai/DeepSpec; torch and transformers are installed by hand. Both sides read the
same weights, tokens and target hidden states (the target's own forward pass is on neither: the reference trains from
hidden states kept on disk), take the same anchors (just as many are possible) and make whole updates with their own
loss, clipping and AdamW; that they do the same work shows in the loss and gradient norm of the first step.

Each measurement is a process of its own, alone; sides take turns, and the tables show medians. CPU seconds are of all
threads together, and vary less where other jobs run beside. A step's peak is the most that the process holds in the
timed steps, less what it holds between them (parameters, optimizer, inputs, libraries); the process's peak is all of
it. The first two steps, which compile, are in neither.

Environment variables reach all sides alike. Under glibc, `MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0
MALLOC_TRIM_THRESHOLD_=1000000000000 MALLOC_TOP_PAD_=268435456` lets processes keep what they free, which spares a step
the page faults of getting it again.
"""

import ctypes
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

Side = Literal["inputs", "ours", "shared", "reference"]

TARGETS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3},
}
RUNS = {
    "tiny": {"num_layers": 1, "tap_ids": (0, 1, 2), "markov_rank": 16, "seq_len": 256, "num_anchors": 64},
    "small": {"num_layers": 2, "tap_ids": (0, 1, 2, 3), "markov_rank": 64, "seq_len": 512, "num_anchors": 128},
    "smollm2": {"num_layers": 2, "tap_ids": (1, 10, 19, 28), "markov_rank": 64, "seq_len": 512, "num_anchors": 128},
}


@dataclasses.dataclass(frozen=True)
class ReferenceStep:
    """Measure training steps of both.

    Attributes:
      reference: the reference's checkout.
      shapes: of target and drafter: tiny, small, smollm2.
      vocab, block_size, batch_size: of all shapes.
      chunk: of our trainer (`train.config.RunConfig`).
      compile: torch.compile the reference's model, as its trainer does.
      processes: measurements of each side; steps: timed steps in each.
      side, work: measure this side here on the inputs in `work` and print JSON, instead of all in their own processes.
        `shared` is ours with `share_targets`: the target's distribution once a position, not once a block position.
    """

    reference: Path
    shapes: tuple[str, ...] = ("tiny", "small", "smollm2")
    vocab: int = 49152
    block_size: int = 7
    batch_size: int = 1
    chunk: int = 640
    compile: bool = True
    processes: int = 3
    steps: int = 3
    side: Side | None = None
    work: Path | None = None

    def run(self) -> None:
        """Prints the tables, or one measurement."""
        if self.side and self.work:
            measure = {"inputs": self.write_inputs, "reference": self.theirs}.get(self.side, self.ours)
            print(json.dumps(measure(self.work)))
            return
        console, load = Console(width=120), os.getloadavg()[0]
        for shape in self.shapes:
            with tempfile.TemporaryDirectory() as work:
                self.measured("inputs", shape, work)
                results: dict[Side, list[dict[str, float]]] = {"ours": [], "shared": [], "reference": []}
                for _ in range(self.processes):
                    for side, measured in results.items():
                        measured.append(self.measured(side, shape, work))
            medians = {s: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for s, rs in results.items()}
            console.print(self.table(shape, medians))
        versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "torch", "transformers"))
        console.print(
            f"{processor()}, {cores()} cores, load average {load:.1f} before, Python {platform.python_version()}, "
            f"{versions}; medians of {self.processes} interleaved processes a side, {self.steps} steps each.\n"
            f"Ours: chunks of {self.chunk}; shared: the target's distribution computed once a position. Reference: "
            f"torch.compile {self.compile}, no FSDP, sdpa with a dense mask, for its flex_attention has no backward "
            "pass on a CPU. The target's own pass is on no side."
        )

    def measured(self, side: Side, shape: str, work: str) -> dict[str, float]:
        """One measurement in a process of its own."""
        command = [sys.executable, "-m", "benchmarks.reference_step", *sys.argv[1:]]
        command += ["--shapes", shape, "--side", side, "--work", work]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if run.returncode:
            raise SystemExit(f"{side!r} of shape {shape!r} failed.")
        return json.loads(run.stdout.splitlines()[-1])

    def table(self, shape: str, medians: dict[Side, dict[str, float]]) -> Table:
        """Medians of all sides, and ours over the reference's."""
        run = RUNS[shape]
        title = (
            f"{shape}: hidden {TARGETS[shape]['hidden_size']}, vocabulary {self.vocab}, {run['num_layers']} draft "
            f"layers, rank {run['markov_rank']}, {self.batch_size} x {run['seq_len']} tokens, "
            f"{run['num_anchors']} anchors of {self.block_size}"
        )
        table = Table(title=title)
        columns = "s a step", "CPU s", "tokens/s", "step's peak MB", "process's peak MB", "first loss", "gradient norm"
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right")
        tokens = self.batch_size * run["seq_len"]
        for side, m in medians.items():
            speed = f"{m['seconds']:.3f}", f"{m['processor']:.3f}", f"{tokens / m['seconds']:,.0f}"
            sizes = (f"{m[k] / 1e6:,.0f}" for k in ("peak", "process"))
            table.add_row(side, *speed, *sizes, f"{m['loss']:.6f}", f"{m['gradient_norm']:.6f}")
        for side in ("ours", "shared"):
            ratio = {k: medians[side][k] / medians["reference"][k] for k in medians[side]}
            speed = f"{ratio['seconds']:.2f}", f"{ratio['processor']:.2f}", f"{1 / ratio['seconds']:.2f}"
            table.add_row(f"{side} / reference", *speed, *(f"{ratio[k]:.2f}" for k in ("peak", "process")))
        return table

    @property
    def settings(self) -> Any:
        """Our trainer's settings of the shape."""
        from train.config import RunConfig

        return RunConfig(
            out="", steps=1000, mask_token_id=self.vocab - 1, draft_vocab_size=0, block_size=self.block_size,
            batch_size=self.batch_size, chunk=self.chunk, share_targets=self.side == "shared", **RUNS[self.shapes[0]],
        )  # fmt: skip

    def target(self) -> Any:
        """A target at random, the same in all processes."""
        from flax import nnx

        from dspark_jax.models.config import TargetConfig
        from dspark_jax.models.decoder import Decoder

        sizes = TARGETS[self.shapes[0]]
        head_dim = sizes["hidden_size"] // sizes["num_heads"]
        return Decoder(TargetConfig("qwen3", self.vocab, head_dim=head_dim, qk_norm=True, **sizes), rngs=nnx.Rngs(0))

    def write_inputs(self, work: Path) -> dict[str, float]:
        """Writes a drafter at random with the target's tables, and a batch with the target's hidden states."""
        import jax
        from flax import nnx

        from dspark_jax.checkpoints.drafter import save_drafter
        from dspark_jax.drafters.kinds import build_drafter

        run, target = self.settings, self.target()
        drafter = build_drafter(run.drafter(target.config), rngs=nnx.Rngs(1))
        w2 = drafter.markov.w2
        w2[...] = jax.random.normal(jax.random.key(0), w2.shape) * w2.shape[-1] ** -0.5
        save_drafter(work / "drafter", drafter, target=target)
        generator, d = np.random.default_rng(0), target.config.hidden_size
        b, t = run.batch_size, run.seq_len
        normal = partial(generator.standard_normal, dtype=np.float32)
        np.savez(
            work / "batch.npz",
            tokens=generator.integers(self.vocab - 1, size=(b, t)),
            # Behind each row's prompt come just the answer tokens that `num_anchors` blocks can start at.
            supervised=np.broadcast_to(np.arange(t) >= t - 1 - run.num_anchors, (b, t)),
            hidden=normal((b, t, d)),
            taps=normal((b, t, len(run.tap_ids) * d)),
        )
        return {}

    def ours(self, work: Path) -> dict[str, float]:
        """Steps of `train.step`."""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from dspark_jax.checkpoints.drafter import load_drafter
        from train.loop import optimizer
        from train.step import StepConfig, TokenBatch, TrainState, train_step

        run = self.settings
        drafter = load_drafter(work / "drafter")
        graph, params, frozen = nnx.split(drafter, nnx.Param, ...)
        target_graph, target = nnx.split(self.target())
        tx = optimizer(run)
        config = StepConfig(
            graph, target_graph, tx, run.weights, run.tap_ids, run.num_anchors, run.chunk, run.share_targets, run.seed
        )
        with np.load(work / "batch.npz") as file:
            arrays = {name: jnp.asarray(file[name]) for name in file}
        tokens = arrays["tokens"]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        features = arrays["hidden"], arrays["taps"], jnp.zeros(tokens.shape)  # normalizers are not read
        batch = TokenBatch(tokens, arrays["supervised"], positions, jnp.zeros_like(tokens), features)
        state = TrainState(jnp.zeros((), int), params, tx.init(params))
        update = jax.jit(partial(train_step, config), donate_argnames=("state",))

        def step() -> tuple[float, float]:
            nonlocal state
            state, metrics = jax.block_until_ready(update(state, frozen, target, batch))
            return float(metrics["loss"]), float(metrics["gradient_norm"])

        return self.timed(step)

    def theirs(self, work: Path) -> dict[str, float]:
        """Steps of the reference's trainer, without its data loader and FSDP."""
        import torch
        from torch.nn.attention.flex_attention import create_mask

        sys.path.insert(0, str(self.reference))
        from deepspec.modeling.dspark import common
        from deepspec.modeling.dspark.loss import compute_dspark_loss
        from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel
        from deepspec.utils import BF16Optimizer

        torch.set_num_threads(cores())
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        common.create_block_mask = create_mask
        draft = Qwen3DSparkModel.from_pretrained(work / "drafter", dtype=torch.float32, attn_implementation="sdpa")
        draft.set_embedding_head_trainable(False)
        model = torch.compile(draft, dynamic=True) if self.compile else draft
        model.train()
        optimizer = BF16Optimizer(draft, lr=6e-4, total_steps=1000, warmup_ratio=0.04)
        with np.load(work / "batch.npz") as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file}

        def step() -> tuple[float, float]:
            outputs = model(
                input_ids=arrays["tokens"],
                target_hidden_states=arrays["taps"],
                loss_mask=arrays["supervised"].to(torch.uint8),
                target_last_hidden_states=arrays["hidden"],
            )
            loss = compute_dspark_loss(
                outputs=outputs, loss_decay_gamma=4.0, ce_loss_alpha=0.1, l1_loss_alpha=0.9, confidence_head_alpha=1.0
            )
            del outputs
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            return loss.item(), norm.item()

        return self.timed(step)

    def timed(self, step: Callable[[], tuple[float, float]]) -> dict[str, float]:
        """Loss and gradient norm of the first step; median seconds and peaks in bytes of those behind the second."""
        loss, gradient_norm = step()
        step()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, seconds, busy = held("VmRSS"), [], []
        for _ in range(self.steps):
            start, worked = time.perf_counter(), time.process_time()
            step()
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - worked)
        most = held("VmHWM")
        return {
            "seconds": statistics.median(seconds),
            "processor": statistics.median(busy),
            "peak": most - before,
            "process": most,
            "loss": loss,
            "gradient_norm": gradient_norm,
        }


def held(name: str) -> int:
    """Bytes this process holds in memory now (VmRSS), or at most since its peak was reset (VmHWM); Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """Its model, where Linux tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    tyro.cli(ReferenceStep, prog="python -m benchmarks.reference_step").run()
