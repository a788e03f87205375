"""Options that save memory or time to compile compute the same loss and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.drafters import Eagle3, Eagle3Config
from dspark_jax.models.splash import splash_attention
from train.data import Document, Piece, pack
from train.losses import LossWeights
from train.step import StepConfig, gradients

TOLERANCE = 1e-5
ANCHORS, T, BLOCK = 8, 24, 2
OPTIONS = {"attention_chunk": 3, "query_chunk": 6, "remat": True, "scan_layers": True}
"""Three anchors do not divide the eight."""


@pytest.fixture(scope="module", params=["dspark", "eagle3"])
def compute(request, tiny_target, make_drafter):
    """compute(**options): gradients and metrics of a step, its program, and how many slots go through it together."""
    slots = BLOCK if request.param == "dspark" else 1
    if request.param == "dspark":
        drafter, weights = make_drafter(tiny_target, block_size=BLOCK, num_layers=1), LossWeights()
    else:
        c = tiny_target.config
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        shape = {name: getattr(c, name) for name in names}
        config = Eagle3Config(**shape, block_size=BLOCK, num_target_layers=c.num_layers, tap_ids=(-1, 0))
        drafter, weights = Eagle3(config, rngs=nnx.Rngs(0)), LossWeights.training_time_test()
    graph, params, frozen = nnx.split(drafter, nnx.Param, ...)
    target_graph, target = nnx.split(tiny_target)
    draw = np.random.default_rng(0)
    documents = [Document(draw.integers(37, size=n).astype(np.int32), np.arange(n) >= 2) for n in (T - 9, 9, T - 2)]
    pieces = [Piece(i, 0, len(document[0])) for i, document in enumerate(documents)]
    batch = jax.tree.map(jnp.asarray, pack(documents, [pieces[:2], pieces[2:]], T))

    def compute(**options):
        config = StepConfig(
            graph, target_graph, optax.identity(), weights, (-1, 0), ANCHORS, 16, share_targets=False, seed=0, **options
        )
        program = jax.jit(partial(gradients, config)).lower(params, jnp.int32(0), frozen, target, batch)
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        run = program.compile(compiler_options=quick)
        return *run(params, jnp.int32(0), frozen, target, batch), program.as_text(), slots

    return compute


@pytest.fixture(scope="module")
def plain(compute):
    return compute()


def test_they_change_nothing_but_rounding(compute, plain):
    gradient, metrics, text, slots = plain
    other_gradient, other, chunked, _ = compute(**OPTIONS)
    assert metrics["supervised"] > 20 and all(np.any(g) for g in jax.tree.leaves(gradient))
    close = partial(np.testing.assert_allclose, atol=TOLERANCE, rtol=TOLERANCE)
    jax.tree.map(close, (other_gradient, other), (gradient, metrics))
    # Scores of all queries of the target, and of all anchors of the drafter.
    for scores in (f"2x2x2x{T}x{T}xf32", f"2x2x2x{ANCHORS}x{slots}x{T}xf32"):
        assert scores in text and scores not in chunked


@pytest.mark.slow
def test_splash_attention_changes_nothing_but_rounding(compute, plain, monkeypatch):
    interpreted = partial(splash_attention, interpret=True)
    for module in ("dspark_jax.drafters.layer", "train.packed_attention"):
        monkeypatch.setattr(f"{module}.splash_attention", interpreted)
    gradient, metrics, *_ = plain
    other_gradient, other, *_ = compute(attention="splash", remat=True, scan_layers=True)
    close = partial(np.testing.assert_allclose, atol=TOLERANCE, rtol=TOLERANCE)
    jax.tree.map(close, (other_gradient, other), (gradient, metrics))


def test_bfloat16_computes_nearly_the_same(compute, plain):
    gradient, metrics, *_ = plain
    other_gradient, other, *_ = compute(**OPTIONS, compute_dtype="bfloat16")
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(other_gradient))
    assert other["loss"] != metrics["loss"]
    np.testing.assert_allclose(other["loss"], metrics["loss"], rtol=0.02)
    norm = optax.tree.norm(jax.tree.map(jnp.subtract, other_gradient, gradient))
    assert norm < 0.05 * metrics["gradient_norm"]
