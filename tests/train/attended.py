"""Blocks through interpreted splash attention on a mesh of eight devices, in its own process, against no mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.drafters import layer
from dspark_jax.models.splash import splash_attention
from dspark_jax.sharding import make_mesh


def main() -> None:
    layer.splash_attention = partial(splash_attention, interpret=True)
    b, a, w, t, h = 4, 6, 3, 40, 8
    draw = np.random.default_rng(0)
    shapes = ((b, a, w, 4, h), *((b, t, 2, h),) * 2, *((b, a, w, 2, h),) * 2)
    x = [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]
    segments = jnp.asarray(np.sort(draw.integers(3, size=(b, t))))
    ends = jnp.asarray(np.sort(draw.integers(t, size=(b, a))))

    def loss(attention, *x):
        documents = jnp.take_along_axis(segments, ends, axis=1)
        return jnp.sum(jnp.sin(layer.block_mix(*x[:3], segments, *x[3:], ends, documents, 0, attention)))

    gradients = lambda attention: jax.jit(jax.grad(partial(loss, attention), argnums=range(5)))  # noqa: E731
    plain = gradients("plain")(*x)
    with jax.set_mesh(make_mesh((2, 2, 2))):
        fused = gradients("splash")(*x)
    assert len(fused[0].sharding.device_set) == 8 and not fused[0].sharding.is_fully_replicated
    for one, other in zip(fused, plain, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


if __name__ == "__main__":
    main()
