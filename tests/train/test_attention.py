"""Attention in kernels is plain attention. Kernels are interpreted, with small tiles, so that there are several."""

import dataclasses
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from dspark_jax.drafters import layer
from dspark_jax.models import splash
from dspark_jax.models.cache import mix
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.splash import Visible, splash_attention
from train.attention import choose_attention
from train.packed_attention import PackedAttention

TOLERANCE = 1e-5
T = 300
SEGMENTS = jnp.array([np.repeat([0, 1, 2, -1], [70, 150, 60, 20]), np.zeros(T, int)])
"""Documents and padding of two rows; the second is one document."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)
    interpreted = partial(splash_attention, interpret=True)
    for module in ("dspark_jax.drafters.layer", "train.packed_attention"):
        monkeypatch.setattr(f"{module}.splash_attention", interpreted)


def numbers(*shapes: tuple[int, ...]) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]


def test_packed_documents():
    q, k, v = numbers((2, T, 2, 8), (2, T, 1, 8), (2, T, 1, 8))
    mixed = {}
    for implementation in ("plain", "splash"):
        attention = PackedAttention(SEGMENTS, implementation=implementation)
        mixed[implementation] = jax.jit(lambda q, k, v, a=attention: a.attend(0, q, k, v, SEGMENTS)[0])(q, k, v)
    np.testing.assert_allclose(mixed["splash"], mixed["plain"], atol=TOLERANCE)


def test_blocks_and_their_gradients():
    a, w, z, h = 70, 3, 2, 8  # A block is as wide as its keys, but for a step of training-time test.
    segments = SEGMENTS[:1]
    ends = np.sort(np.random.default_rng(1).integers(-1, T - 20, (1, a)), axis=1)
    # What is missing of anchors stands at the end, with index 0.
    ends[:, -5:] = 0
    documents = jnp.take_along_axis(segments, np.maximum(ends, 0), axis=1)
    context, own = ((1, T, 1, h),) * 2, ((1, a, z, 1, h),) * 2
    q, k, v, k_block, v_block, out = numbers((1, a, w, 2, h), *context, *own, (1, a, w, 2, h))

    def run(attention):
        def of(*x):
            mixed = layer.block_mix(*x[:3], segments, *x[3:], ends, documents, 16, attention)
            return jnp.sum(mixed * out), mixed

        return jax.jit(jax.grad(of, argnums=range(5), has_aux=True))(q, k, v, k_block, v_block)

    for fused, plain in zip(*map(jax.tree.leaves, (run("splash"), run("plain"))), strict=True):
        assert np.any(plain)
        np.testing.assert_allclose(fused, plain, atol=TOLERANCE)


def test_tiles_that_hold_nothing_to_see_are_skipped():
    a, w, t = 128, 3, 512
    segments = np.repeat([0, 1], [200, 312])
    anchors = np.sort(np.random.default_rng(2).choice(t, a, replace=False))
    ends, own, queries = (np.repeat(x, w) for x in (anchors, t + w * np.arange(a), segments[anchors]))
    keys = np.concatenate([segments, queries])
    key = np.arange(len(keys))
    mine = (own[:, None] <= key) & (key < own[:, None] + w)
    seen = ((key < ends[:, None]) | mine) & (queries[:, None] == keys)
    runs = splash._tiles(Visible(ends, own, queries, keys, w), 128, 128)
    needed = seen.reshape(3, 128, 7, 128).any((1, 3))
    assert runs[needed].all() and runs.sum() <= needed.sum() + 1 and needed.sum() < runs.size - 5
    following = np.asarray(splash._next(jnp.asarray(runs)))
    assert (following[runs] == np.nonzero(runs)[1]).all()


@pytest.mark.slow
def test_each_device_attends_for_its_rows_and_heads():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-m", "tests.train.attended"], env={**os.environ, **flags}, check=True, timeout=600)


TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
OLD = SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5")
AMD = SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.mark.parametrize(
    ("device", "tensor", "dtype", "kind", "missing"),
    [
        (TPU, 2, jnp.float32, "splash", "cudnn needs an NVIDIA GPU"),
        (TPU, 4, jnp.bfloat16, "plain", "splash needs a tensor axis that divides the 2 key heads"),
        (GPU, 1, jnp.bfloat16, "cudnn", "splash needs a TPU"),
        (GPU, 1, jnp.float32, "plain", "cudnn needs a target in bfloat16"),
        (OLD, 1, jnp.bfloat16, "plain", "cudnn needs an NVIDIA GPU of compute capability 8.0 or later;"),
        (AMD, 1, jnp.bfloat16, "plain", "cudnn needs an NVIDIA GPU of compute capability 8.0 or later;"),
        (CPU, 1, jnp.bfloat16, "plain", "splash needs a TPU"),
    ],
)
def test_what_runs_where(device, tensor, dtype, kind, missing):
    mesh = SimpleNamespace(devices=np.array([device]), shape={"data": 1, "fsdp": 1, "tensor": tensor})
    choose = lambda run: choose_attention(run, TargetConfig.from_hf(tiny.TARGET), dtype, mesh)  # noqa: E731
    assert choose(tiny.run) == kind
    assert choose(dataclasses.replace(tiny.run, attention="plain")) == "plain"
    with pytest.raises(ValueError, match=missing):
        choose(dataclasses.replace(tiny.run, attention=missing.split()[0]))


def test_rows_longer_than_the_kernel_can_tell_apart_attend_plainly():
    mesh = SimpleNamespace(devices=np.array([TPU]), shape={"tensor": 1})
    choose = lambda **fields: choose_attention(  # noqa: E731
        dataclasses.replace(tiny.run, **fields), TargetConfig.from_hf(tiny.TARGET), jnp.float32, mesh
    )
    assert choose(seq_len=32767) == "splash"
    assert choose(seq_len=32768) == choose(seq_len=32767, num_anchors=6554) == "plain"


@pytest.mark.gpu
def test_packed_documents_on_a_gpu():
    q, k, v = (x.astype(jnp.bfloat16) for x in numbers((2, T, 4, 64), (2, T, 2, 64), (2, T, 2, 64)))
    fused, _ = PackedAttention(SEGMENTS, implementation="cudnn").attend(0, q, k, v, SEGMENTS)
    causal = jnp.tril(jnp.ones((T, T), bool)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
    plain = mix(*(x.astype(jnp.float32) for x in (q, k.swapaxes(1, 2), v.swapaxes(1, 2))), causal)
    np.testing.assert_allclose(fused.astype(jnp.float32), plain, atol=0.02)
