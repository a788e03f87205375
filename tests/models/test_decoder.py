"""The decoder's own conventions: taps, padding rows, dropped writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.decoder import check_taps


def run(target, tokens, tap_ids=(), slots=8, positions=None):
    tokens = jnp.asarray(tokens)
    positions = jnp.arange(tokens.shape[1])[None] if positions is None else jnp.asarray(positions)
    step = jax.jit(lambda tokens, positions, cache: target(tokens, positions, cache, tap_ids))
    return step(tokens, positions, target.create_cache(tokens.shape[0], slots))


def test_tap_is_the_output_of_its_layer(golden):
    """Against the reference: taps 0, 2 and 4 alone, and -1 beside them, are the same columns."""
    case = golden("qwen3_dspark_markov")
    tokens = jnp.asarray(case.expected["train.input_ids"][:, :8])
    joined = run(case.target, tokens, (-1, 0, 4), positions=jnp.broadcast_to(jnp.arange(8), (2, 8)))[1]
    embedding, first, last = jnp.split(joined, 3, axis=-1)
    expected = np.split(case.expected["target.context_features"][:, :8], 3, axis=-1)
    np.testing.assert_array_equal(embedding, case.target.embed(tokens))
    np.testing.assert_allclose(first, expected[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(last, expected[2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("bad", [[], [-2, 0], [0, 5], [0, 6], [2, 1], [1, 1], [-1, -1]])
def test_tap_the_target_cannot_have_is_refused_by_its_depth(bad):
    assert check_taps([-1, 0, 4], 6) == (-1, 0, 4)
    with pytest.raises(ValueError, match=r"within -1\.\.4 for a target of 6 layers .* last layer 5 is refused"):
        check_taps(bad, 6)


def test_padding_row_is_embedded_but_never_sampled(tiny_target):
    hidden, _, _ = run(tiny_target, [[1, 37, 39]])
    logits = tiny_target.logits(hidden)
    assert np.isfinite(hidden).all() and np.isfinite(logits[..., :37]).all()
    assert (logits[..., 37:] == -jnp.inf).all() and logits.shape[-1] == 40
    np.testing.assert_array_equal(tiny_target.embed(jnp.array(39)), tiny_target.embedding[39])


def test_padding_position_changes_nothing_and_a_write_beyond_the_cache_is_dropped(tiny_target):
    alone, _, _ = run(tiny_target, [[5, 6]])
    padded, _, cache = run(tiny_target, [[9, 5, 6, 9]], positions=[[-1, 0, 1, -1]])
    np.testing.assert_allclose(padded[:, 1:3], alone, atol=1e-6)
    assert all((keys[:, :, 2:] == 0).all() for keys in cache.keys)
    _, _, cache = run(tiny_target, [[5, 6, 7]], slots=2)
    _, _, fits = run(tiny_target, [[5, 6]], slots=2)
    np.testing.assert_allclose(cache.keys[0], fits.keys[0], atol=1e-6)
