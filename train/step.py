"""One training step: the frozen target runs on line, the drafter learns from its hidden states."""

import dataclasses
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.drafters.kinds import AnyDrafter
from dspark_jax.models.decoder import Decoder
from dspark_jax.models.rope import rotation
from dspark_jax.sharding import by_rows, constrain
from train.accumulate import accumulated
from train.anchors import block_labels, sample_anchors
from train.losses import Labels, LossWeights, Predictions, at_rows, dspark_loss, target_table
from train.packed_attention import Attention, PackedAttention

Array = TypeVar("Array", jax.Array, np.ndarray)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch(Generic[Array]):
    """Packed documents, all [b, t]; of NumPy arrays on the host, of JAX arrays in a step.

    Attributes:
      tokens: ids; supervised: booleans, true on the tokens a drafter learns to predict.
      positions: position in the document; segments: number of the document in its row, -1 on padding.
      features: the target's final hidden states [b, t, d], taps [b, t, m * d] and normalizers [b, t] (see
        `train.losses.Labels`), or None to run it on line.
    """

    tokens: Array
    supervised: Array
    positions: Array
    segments: Array
    features: tuple[Array, Array, Array] | None = None


def target_features(
    target: Decoder,
    batch: TokenBatch,
    tap_ids: tuple[int, ...],
    query_chunk: int = 0,
    scan_layers: bool = False,
    attention: Attention = "plain",
) -> tuple[jax.Array, jax.Array]:
    """Final hidden states [b, t, d] and taps [b, t, m * d] of packed documents, without gradient.

    Args:
      query_chunk, attention: see `PackedAttention`.
      scan_layers: run the layers as one loop, on a copy of their parameters: compiles as fast as one layer.
    """
    cache = PackedAttention(batch.segments, query_chunk, attention)
    run = _scanned if scan_layers else Decoder.__call__
    hidden, taps, *_ = run(target, batch.tokens, batch.positions, cache, tap_ids)
    return jax.lax.stop_gradient((hidden, taps))


def _scanned(
    target: Decoder, tokens: jax.Array, positions: jax.Array, cache: PackedAttention, tap_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """`Decoder.__call__` with its layers as one loop."""
    x = target.embed(tokens)
    turn = rotation(target.config.rope, target.config.head_dim, positions)
    graphs, layers = zip(*map(nnx.split, target.layers), strict=True)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    # A layer writes its output where its tap stands; those without one write behind the last tap.
    slots = [tap_ids.index(i) if i in tap_ids else len(tap_ids) for i in range(len(layers))]
    taps = jnp.zeros((len(tap_ids) + 1, *x.shape), x.dtype)
    taps = taps.at[0].set(x) if -1 in tap_ids else taps

    def body(carry, layer):
        (x, taps), (params, slot) = carry, layer
        x, _ = nnx.merge(graphs[0], params)(x, 0, positions, *turn, cache)
        return (x, taps.at[slot].set(x)), None

    (x, taps), _ = jax.lax.scan(body, (x, taps), (stacked, jnp.array(slots)))
    return target.norm(x), jnp.concatenate([*taps[:-1]], axis=-1)


def drafter_loss(
    drafter: AnyDrafter,
    target: Decoder,
    batch: TokenBatch,
    hidden: jax.Array,
    taps: jax.Array,
    anchors: jax.Array,
    keep: jax.Array,
    weights: LossWeights,
    chunk: int = 512,
    share_targets: bool = False,
    normalizers: jax.Array | None = None,
    attention_chunk: int = 0,
    remat: bool = False,
    attention: Attention = "plain",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of a drafter on blocks at `anchors` [b, a] (kept where `keep`), given the target's hidden states and taps.

    Args:
      share_targets: compute the target's distribution once a position ([b, t, draft_rows] in memory) instead of once a
        block position; less work when anchors * g exceeds the sequence.
      normalizers: [b, t] of the target's logits, where they are known; see `train.losses.Labels`.
      attention_chunk, remat: see `DSpark.blocks`; attention: of `train.attention.choose_attention`.

    Returns:
      The loss and metrics: the three terms, acceptance by position, expected accepted length, confidence error.
    """
    g = drafter.config.block_size
    index, labels, mask = block_labels(batch.tokens, batch.supervised, batch.segments, anchors, keep, g)
    read = hidden if drafter.config.reads_final_hidden else taps
    packed = batch.positions, batch.segments
    out = by_rows(drafter.blocks(target, batch.tokens, read, anchors, *packed, attention_chunk, remat, attention))
    previous = jnp.concatenate(
        [jnp.take_along_axis(batch.tokens, anchors, axis=1)[..., None], labels[..., :-1]], axis=-1
    )
    confidence = drafter.confidence_logits(previous, out)
    latent = drafter.latents(previous, out)
    flat = lambda tree: jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), tree)  # noqa: E731
    predicts = flat(index - 1)
    predictions = Predictions(
        flat(out),
        flat(latent),
        constrain(drafter.markov.w2[...], "tensor", None) if drafter.markov else None,
        flat(confidence),
    )
    truth = Labels(
        hidden=at_rows(hidden, predicts),
        tokens=flat(labels),
        weight=flat(mask * weights.positions(g)),
        # Gathered once, not in every chunk; what is split over vocabulary stays split.
        head=constrain(target.head_weight, "tensor", None),
        draft_head=constrain(drafter.draft_head(target), "tensor", None),
        draft_ids=None if drafter.draft_ids is None else drafter.draft_ids[...],
        normalizer=None if normalizers is None else at_rows(normalizers, predicts),
        num_tokens=target.config.num_tokens,
    )
    if share_targets:
        table = target_table(truth, hidden, normalizers, chunk)
        truth = dataclasses.replace(truth, hidden=None, normalizer=None, shared=(table, predicts))
    loss, metrics = dspark_loss(predictions, jax.lax.stop_gradient(truth), weights, chunk)
    accept = metrics.pop("accept").reshape(mask.shape) * mask
    count = jnp.sum(mask, axis=(0, 1))
    blocks = jnp.maximum(jnp.sum(mask[..., 0]), 1)
    metrics["accept_rate"] = jnp.sum(accept, axis=(0, 1)) / jnp.maximum(count, 1)
    metrics["tau"] = 1 + jnp.sum(jnp.cumprod(accept, axis=-1)) / blocks
    if confidence is not None:
        error = jnp.abs(jax.nn.sigmoid(confidence) - accept) * mask
        metrics["confidence_error"] = jnp.sum(error) / jnp.maximum(jnp.sum(mask), 1)
    metrics["supervised"] = jnp.sum(mask)
    return loss, metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes.

    Attributes:
      step: updates done; params: the drafter's trainable parameters; optimizer: Optax state.
    """

    step: jax.Array
    params: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The static half of a step; see `train.config.RunConfig`.

    `compute_dtype` is what parameters are cast to before they are used.
    """

    graph: Any
    target_graph: Any
    optimizer: optax.GradientTransformation
    weights: LossWeights
    tap_ids: tuple[int, ...]
    num_anchors: int
    chunk: int
    share_targets: bool
    seed: int
    accumulate: int = 1
    attention_chunk: int = 0
    query_chunk: int = 0
    remat: bool = False
    compute_dtype: str = "float32"
    scan_layers: bool = False
    attention: Attention = "plain"


def _cast(tree: Any, dtype: str) -> Any:
    """A tree with its floating numbers in `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def gradients(
    config: StepConfig, params: Any, step: jax.Array, frozen: Any, target: Any, batch: TokenBatch
) -> tuple[Any, dict[str, jax.Array]]:
    """Gradient of the loss of update `step`, and the metrics of `drafter_loss` with the gradient's norm.

    Args:
      params: the drafter's trainable parameters; frozen: its other variables; target: the target's parameters.
      batch: packed documents, rows split over the mesh if there is one.
    """
    batch = jax.tree.map(by_rows, batch)
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    anchors, keep = sample_anchors(key, batch.supervised, batch.segments, config.num_anchors)
    compute = partial(_gradients, config, params, frozen, target)
    if config.accumulate == 1:
        return compute(batch, anchors, keep)
    g = nnx.merge(config.graph, params, frozen).config.block_size
    *_, mask = block_labels(batch.tokens, batch.supervised, batch.segments, anchors, keep, g)
    return accumulated(compute, params, (batch, anchors, keep), mask, config.weights.positions(g), config.accumulate)


def _gradients(
    config: StepConfig, params: Any, frozen: Any, target: Any, batch: TokenBatch, anchors: jax.Array, keep: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """`gradients` of the blocks at `anchors` [b, a], kept where `keep`."""
    decoder = nnx.merge(config.target_graph, target)
    if batch.features is None:
        with jax.named_scope("target"):
            hidden, taps = target_features(
                decoder, batch, config.tap_ids, config.query_chunk, config.scan_layers, config.attention
            )
        normalizers = None
    else:
        hidden, taps = (x.astype(decoder.dtype) for x in batch.features[:2])
        normalizers = batch.features[2]
    hidden, taps = by_rows(hidden), by_rows(taps)

    def loss(params):
        drafter = nnx.merge(config.graph, *_cast((params, frozen), config.compute_dtype))
        return drafter_loss(
            drafter, decoder, batch, hidden, taps, anchors, keep,
            config.weights, config.chunk, config.share_targets, normalizers, config.attention_chunk, config.remat,
            config.attention,
        )  # fmt: skip

    gradient, metrics = jax.grad(loss, has_aux=True)(params)
    metrics["gradient_norm"] = optax.tree.norm(gradient)
    return gradient, metrics


def train_step(
    config: StepConfig, state: TrainState, frozen: Any, target: Any, batch: TokenBatch
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update, and the metrics of `gradients`.

    A batch without a supervised token has a zero gradient, but counts as a step, so that all hosts stay together.
    """
    gradient, metrics = gradients(config, state.params, state.step, frozen, target, batch)
    updates, optimizer = config.optimizer.update(gradient, state.optimizer, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer), metrics


def jit_step(config: StepConfig, lie: TrainState, mesh: Mesh) -> Any:
    """`train_step` as one program, which takes its state's memory over and leaves it on the mesh as `lie` says."""
    everywhere = NamedSharding(mesh, P())
    return jax.jit(partial(train_step, config), donate_argnames="state", out_shardings=(lie, everywhere))
