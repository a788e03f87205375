"""What a run is: one frozen dataclass, one file a run under configs/, every field settable from the command line."""

import dataclasses
import math
import runpy
import sys
from pathlib import Path
from typing import Literal

from dspark_jax.drafters import DrafterConfig, Eagle3Config, MTPConfig
from dspark_jax.drafters.kinds import AnyDrafterConfig
from dspark_jax.models.config import TargetConfig
from train.data.turns import ChatOptions
from train.losses import LossWeights


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A distillation run.

    Attributes:
      out: directory of checkpoints and of the exported drafter.
      data: files or directories of JSONL (.jsonl, .jsonl.gz) or Parquet: rows of {"messages": [...]} or
        {"conversations": [...]}, or of {"prompt": ids, "answer": ids}, as `python -m train.regenerate` writes them.
      tokens: directory of the tokenised data; empty is `out`/tokens. Runs on the same data can share it.
      chat: how conversations become documents.
      target: what `load_target` takes; `smollm2` is the embedded default.
      kind: `dspark` (DFlash with markov_rank 0), or `eagle3` or `mtp`, which train on their own states for block_size
        steps (training-time test); these have one layer and no heads, and `mtp` reads no taps.
      num_layers, block_size, tap_ids, markov_rank, markov_head_type, intermediate_size: the drafter's shape; 0 for
        intermediate_size takes the target's.
      draft_vocab_size: most frequent answer tokens that can be drafted; 0 is all.
      warm_start: target layers whose weights the draft layers start from, a wider MLP's first units included; empty
        starts at random.
      initial_drafter: a drafter checkpoint of the same shape to go on from, instead; a smaller draft vocabulary
        grows.
      train_only: modules to train, the rest of the initial drafter stays; empty trains all. `confidence` alone, on
        documents the drafter was not trained on, corrects a head that saw only documents the drafter knows by heart.
      seq_len, batch_size: packed tokens a row, rows a step; num_anchors: blocks sampled a row.
      cache_features: run the target once over all documents and keep its hidden states on disk, instead of on line in
        every step; pays when documents are seen more than once. features: directory of them, which implies it; empty is
        `out`/features. Runs on the same data can share it, if it has their taps. features_dtype: of states there; int8
        takes half the room, at less precision.
      share_targets: see `train.step.drafter_loss`.
      chunk: block positions whose logits exist at once on a device.
      attention: `splash` is a kernel for TPU that never holds scores, `cudnn` one for NVIDIA GPUs and the target alone;
        `auto` takes what devices and target allow. attention_chunk, query_chunk: anchors of a row in the drafter, and
        queries of a row in the target, whose scores exist at once where attention is plain; 0 is all.
      remat: keep little of the drafter for the backward pass, and compute the rest again. scan_layers: run the target's
        layers as one loop, on a copy of their parameters, which compiles much faster. These and attention change memory
        and time, and results by rounding alone.
      compute_dtype: of the drafter's activations and products. Its parameters and the optimizer stay float32.
      weights: of the loss's terms; without one on confidence a DSpark drafter has no confidence head.
      optimizer: `muon` orthogonalises the updates of the backbone's matrices; everything else stays with AdamW.
      mesh: devices along (data, fsdp, tensor), one of them -1 for what is left. Rows of a batch are split over data and
        fsdp, parameters over fsdp and tensor; what is computed does not depend on it, up to rounding.
      steps: updates in all; the schedule ends there.
      accumulate: micro-batches that a step's rows are computed in, one after another; changes memory and rounding only.
      ema: decay of an average of the parameters over updates, which is what is exported and evaluated; 0 keeps none.
      eval_every: updates between evaluations by generation, 0 is never; eval_data: files of {"turns": [text, ...]}
        rows, a domain each; eval_prompts: of each; eval_tokens: generated for each prompt, at most.
      checkpoint_every, log_every: updates between checkpoints, and between metrics told.
    """

    out: str
    data: tuple[str, ...] = ()
    tokens: str = ""
    chat: ChatOptions = dataclasses.field(default_factory=ChatOptions)
    target: str = "smollm2"
    kind: Literal["dspark", "eagle3", "mtp"] = "dspark"
    num_layers: int = 2
    block_size: int = 7
    tap_ids: tuple[int, ...] = (1, 10, 19, 28)
    mask_token_id: int = 16
    markov_rank: int = 64
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    intermediate_size: int = 0
    draft_vocab_size: int = 8192
    warm_start: tuple[int, ...] = ()
    initial_drafter: str = ""
    train_only: tuple[str, ...] = ()
    seq_len: int = 512
    batch_size: int = 8
    num_anchors: int = 128
    cache_features: bool = False
    features: str = ""
    features_dtype: Literal["bfloat16", "int8"] = "bfloat16"
    share_targets: bool = False
    chunk: int = 640
    attention: Literal["auto", "plain", "splash", "cudnn"] = "auto"
    attention_chunk: int = 0
    query_chunk: int = 0
    remat: bool = False
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    scan_layers: bool = False
    mesh: tuple[int, int, int] = (-1, 1, 1)
    steps: int = 1000
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.0
    accumulate: int = 1
    weights: LossWeights = dataclasses.field(default_factory=LossWeights)
    seed: int = 0
    checkpoint_every: int = 50
    log_every: int = 1
    eval_every: int = 0
    eval_data: tuple[str, ...] = ()
    eval_prompts: int = 16
    eval_tokens: int = 64

    def __post_init__(self) -> None:
        if self.warm_start and len(self.warm_start) != self.num_layers:
            raise ValueError(f"warm_start names {len(self.warm_start)} layers for {self.num_layers} draft layers.")
        if self.warm_start and self.initial_drafter:
            raise ValueError("warm_start and initial_drafter both say where the weights come from; give one.")
        if self.train_only and not self.initial_drafter:
            raise ValueError(
                f"train_only {list(self.train_only)} would leave the rest at random; give initial_drafter."
            )
        if self.kind != "dspark":
            wanted = {"num_layers": 1, "markov_rank": 0}
            if self.kind == "mtp":
                wanted["tap_ids"] = ()
            if wrong := {k: getattr(self, k) for k, v in wanted.items() if getattr(self, k) != v}:
                raise ValueError(f"an {self.kind} drafter cannot have {wrong}; expected {wanted}.")
        sizes = ("num_layers", "block_size", "steps", "batch_size", "seq_len", "num_anchors", "chunk")
        for name in (*sizes, "accumulate", "checkpoint_every", "log_every", "eval_prompts", "eval_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        counts = ("markov_rank", "intermediate_size", "draft_vocab_size", "eval_every")
        for name in (*counts, "attention_chunk", "query_chunk"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if self.query_chunk and self.seq_len % self.query_chunk:
            raise ValueError(f"query_chunk must divide seq_len {self.seq_len}, got {self.query_chunk}.")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}.")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must be within 0..1, 1 excluded, got {self.ema}; 0 keeps no average.")
        if bool(self.eval_every) != bool(self.eval_data):
            raise ValueError(
                f"eval_every {self.eval_every} and eval_data {list(self.eval_data)} must be given together."
            )

    @property
    def tokens_directory(self) -> Path:
        """Where the tokenised data are kept."""
        return Path(self.tokens or f"{self.out}/tokens").absolute()

    @property
    def reads_features(self) -> bool:
        """Whether steps read the target's hidden states from disk."""
        return self.cache_features or bool(self.features)

    @property
    def features_directory(self) -> Path:
        """Where the target's hidden states are kept."""
        return Path(self.features or f"{self.out}/features").absolute()

    def drafter(self, target: TargetConfig) -> AnyDrafterConfig:
        """The drafter's config for a target."""
        names = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope")
        shape = {
            **{name: getattr(target, name) for name in (*names, "max_positions")},
            "intermediate_size": self.intermediate_size or target.intermediate_size,
            "num_target_layers": target.num_layers,
            "block_size": self.block_size,
            "draft_vocab_size": self.draft_vocab_size,
        }
        if self.kind == "eagle3":
            return Eagle3Config(**shape, tap_ids=self.tap_ids, step_decay=self.weights.step_decay)
        if self.kind == "mtp":
            return MTPConfig(**shape, step_decay=self.weights.step_decay)
        return DrafterConfig(
            **shape,
            num_layers=self.num_layers,
            tap_ids=self.tap_ids,
            mask_token_id=self.mask_token_id,
            markov_rank=self.markov_rank,
            markov_head_type=self.markov_head_type,
            confidence_head=self.weights.confidence > 0,
            confidence_with_markov=self.weights.confidence > 0 and self.markov_rank > 0,
            num_anchors=self.num_anchors,
        )


def read_config(command: str) -> tuple[RunConfig, list[str]]:
    """The run of the file that the command line names first, and the arguments behind it.

    Raises:
      SystemExit: no file is named; ValueError: it sets no `run`.
    """
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(f"usage: python -m {command} configs/RUN.py [--field value ...]")
    run = runpy.run_path(sys.argv[1]).get("run") if Path(sys.argv[1]).is_file() else None
    if not isinstance(run, RunConfig):
        raise ValueError(f"{sys.argv[1]} is no run; expected a Python file that sets `run` to a RunConfig.")
    return run, sys.argv[2:]
