"""Starting a drafter from layers of its own target."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.eagle3 import Eagle3
from dspark_jax.drafters.kinds import AnyDrafter
from dspark_jax.drafters.layer import DraftLayer
from dspark_jax.drafters.mtp import MTP
from dspark_jax.models.decoder import Decoder, DecoderLayer


def warm_start(drafter: AnyDrafter, target: Decoder, layers: Sequence[int], sample: jax.Array) -> None:
    """Copies target layers into the draft layers, in place.

    What the drafter reads of the target starts as a pass-through of its deepest state, which is what a late layer's
    keys expect; an embedding that Eagle3 and MTP read beside it starts without effect. A wider MLP has the target's
    units, and further ones at random whose output is zero. Where the drafter norms queries and keys and the target does
    not, the scales start at the typical size of the target's.

    Args:
      layers: one target layer a draft layer.
      sample: token ids [b, t], real text, to measure those sizes on.

    Raises:
      ValueError: a layer the target lacks, or a narrower MLP than its own.
    """
    width, own = drafter.config.intermediate_size, target.config.intermediate_size
    if width < own:
        raise ValueError(f"warm start needs an intermediate_size of at least the target's {own}, got {width}.")
    if bad := [i for i in layers if not 0 <= i < target.config.num_layers]:
        raise ValueError(f"warm_start layers {bad} are not in 0..{target.config.num_layers - 1}.")
    drafter.norm.scale[...] = _copy(target.norm.scale, drafter)
    inputs, final = _layer_inputs(target, layers, sample)
    first = target.layers[layers[0]]
    d, read = drafter.fc.weight.shape
    drafter.fc.weight[...] = jnp.eye(d, read, read - d, dtype=drafter.dtype)
    if isinstance(drafter, DSpark):
        drafter.context_norm.scale[...] = _copy(first.attention_norm.scale, drafter)
        if drafter.markov:
            components = principal_components(target.embedding[...], drafter.markov.rank)
            drafter.markov.w1[...] = components.astype(drafter.dtype)
        draft_layers = list(drafter.layers)
    else:
        draft_layers = [drafter.layer]
    if isinstance(drafter, Eagle3):
        drafter.hidden_norm.scale[...] = _copy(first.attention_norm.scale, drafter)
    else:
        for draft, index in zip(draft_layers, layers, strict=True):
            draft.attention_norm.scale[...] = _copy(target.layers[index].attention_norm.scale, drafter)
    if isinstance(drafter, MTP):
        # The final hidden state, channel by channel at the size of what the layer reads in the target.
        direction = final * jax.lax.rsqrt(jnp.mean(final * final, axis=-1, keepdims=True))
        scale = jnp.mean(direction * inputs[layers[0]], axis=(0, 1)) / jnp.mean(direction**2, axis=(0, 1))
        drafter.hidden_norm.scale[...] = scale.astype(drafter.dtype)
    for draft, index in zip(draft_layers, layers, strict=True):
        _copy_layer(draft, target.layers[index], inputs[index], drafter)


def _copy_layer(draft: DraftLayer, source: DecoderLayer, inputs: jax.Array, drafter: AnyDrafter) -> None:
    """A target's layer, which read `inputs` [b, t, d], into one of the drafter's; but for the norm in front of it."""
    draft.mlp_norm.scale[...] = _copy(source.mlp_norm.scale, drafter)
    weight, old = draft.attention.qkv.weight, _copy(source.attention.qkv.weight, drafter)
    # Eagle3's attention reads [embedding; state]; the state stands for what the target's layer reads.
    weight[...] = jnp.pad(old, ((0, 0), (weight.shape[1] - old.shape[1], 0)))
    draft.attention.out.weight[...] = _copy(source.attention.out.weight, drafter)
    units = source.mlp.down.weight.shape[1]
    wide, narrow = draft.mlp.gate_up.weight[...], _copy(source.mlp.gate_up.weight, drafter)
    pairs = zip(jnp.split(wide, 2), jnp.split(narrow, 2), strict=True)
    draft.mlp.gate_up.weight[...] = jnp.concatenate([new.at[:units].set(old) for new, old in pairs])
    down = jnp.zeros_like(draft.mlp.down.weight[...])
    draft.mlp.down.weight[...] = down.at[:, :units].set(_copy(source.mlp.down.weight, drafter))
    q, k, _ = source.attention.split(source.attention_norm(inputs))
    for name, x in (("q_norm", q), ("k_norm", k)):
        theirs, ours = getattr(source.attention, name), getattr(draft.attention, name)
        if ours is not None:
            size = jnp.full_like(ours.scale[...], jnp.mean(jnp.sqrt(jnp.mean(x * x, axis=-1))))
            ours.scale[...] = size if theirs is None else _copy(theirs.scale, drafter)


def _copy(parameter, drafter: AnyDrafter) -> jax.Array:
    """A copy, not an alias: the training step donates the drafter's buffers."""
    return jnp.array(parameter[...], drafter.dtype, copy=True)


def _layer_inputs(target: Decoder, layers: Sequence[int], sample: jax.Array) -> tuple[dict[int, jax.Array], jax.Array]:
    """What the layers read on a sample, and its final hidden states."""
    taps = sorted({i - 1 for i in layers})
    positions = jnp.broadcast_to(jnp.arange(sample.shape[1]), sample.shape)
    final, joined, _ = target(sample, positions, target.create_cache(*sample.shape), taps)
    return dict(zip((i + 1 for i in taps), jnp.split(joined, len(taps), axis=-1), strict=True)), final


def principal_components(table: jax.Array, rank: int) -> jax.Array:
    """A table [v, d] in its leading components [v, rank], scaled to unit variance over all entries."""
    centred = (table - jnp.mean(table, axis=0)).astype(jnp.float32)
    components = jnp.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :rank]
    reduced = centred @ components
    return reduced / jnp.std(reduced)
