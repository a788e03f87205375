"""Starting a drafter from layers of its own target."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dspark_jax.drafters.dspark import DSpark
from dspark_jax.models.decoder import Decoder


def warm_start(drafter: DSpark, target: Decoder, layers: Sequence[int], sample: jax.Array) -> None:
    """Copies target layers into the draft layers, in place.

    The context projection starts as a pass-through of the deepest tap, which is what a late layer's keys expect. Where
    the drafter norms queries and keys and the target does not, the scales start at the typical size of the target's.

    Args:
      layers: one target layer a draft layer.
      sample: token ids [b, t], real text, to measure those sizes on.

    Raises:
      ValueError: a layer the target lacks, or shapes that differ.
    """
    if drafter.config.intermediate_size != target.config.intermediate_size:
        raise ValueError("warm start needs the target's own intermediate_size in the drafter.")
    if bad := [i for i in layers if not 0 <= i < target.config.num_layers]:
        raise ValueError(f"warm_start layers {bad} are not in 0..{target.config.num_layers - 1}.")

    def copy(parameter):
        # A copy, not an alias: the training step donates the drafter's buffers.
        return jnp.array(parameter[...], drafter.dtype, copy=True)

    d, taps = drafter.config.hidden_size, len(drafter.config.tap_ids)
    drafter.fc.weight[...] = jnp.concatenate([jnp.zeros((d, (taps - 1) * d)), jnp.eye(d)], axis=1).astype(drafter.dtype)
    drafter.norm.scale[...] = copy(target.norm.scale)
    drafter.context_norm.scale[...] = copy(target.layers[layers[0]].attention_norm.scale)
    if drafter.markov:
        drafter.markov.w1[...] = principal_components(target.embedding[...], drafter.markov.rank).astype(drafter.dtype)
    inputs = _layer_inputs(target, layers, sample)
    for draft, index in zip(drafter.layers, layers, strict=True):
        source = target.layers[index]
        for module in ("attention_norm", "mlp_norm"):
            getattr(draft, module).scale[...] = copy(getattr(source, module).scale)
        for module, part in (("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up"), ("mlp", "down")):
            old, new = getattr(getattr(source, module), part), getattr(getattr(draft, module), part)
            new.weight[...] = copy(old.weight)
        q, k, _ = source.attention.split(source.attention_norm(inputs[index]))
        for name, x in (("q_norm", q), ("k_norm", k)):
            theirs, ours = getattr(source.attention, name), getattr(draft.attention, name)
            if ours is not None:
                size = jnp.full_like(ours.scale[...], jnp.mean(jnp.sqrt(jnp.mean(x * x, axis=-1))))
                ours.scale[...] = size if theirs is None else copy(theirs.scale)


def _layer_inputs(target: Decoder, layers: Sequence[int], sample: jax.Array) -> dict[int, jax.Array]:
    taps = sorted({i - 1 for i in layers})
    positions = jnp.broadcast_to(jnp.arange(sample.shape[1]), sample.shape)
    joined = target(sample, positions, target.create_cache(*sample.shape), taps)[1]
    return dict(zip((i + 1 for i in taps), jnp.split(joined, len(taps), axis=-1), strict=True))


def principal_components(table: jax.Array, rank: int) -> jax.Array:
    """A table [v, d] in its leading components [v, rank], scaled to unit variance over all entries."""
    centred = (table - jnp.mean(table, axis=0)).astype(jnp.float32)
    components = jnp.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :rank]
    reduced = centred @ components
    return reduced / jnp.std(reduced)
