"""The function that runs inside a round: its twin, its order, its ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dspark_jax.calibration import to_survival
from dspark_jax.calibration.survival import sigmoid, to_survival_twin

LOGITS = arrays(np.float32, (6, 4), elements=st.floats(-80, 80, width=32) | st.sampled_from([np.inf, -np.inf, 0.0]))
TEMPERATURES = st.tuples(*[st.floats(0.1, 10)] * 4)

jitted = jax.jit(to_survival, static_argnames="temperatures")


@given(LOGITS, st.none() | TEMPERATURES)
def test_it_equals_its_twin_and_never_grows(logits, temperatures):
    survival = np.asarray(to_survival(jnp.asarray(logits), temperatures))
    assert survival.dtype == np.float32 and not np.isnan(survival).any()
    np.testing.assert_allclose(survival, to_survival_twin(logits, temperatures), rtol=2e-5, atol=1e-30)
    assert (survival >= 0).all() and (survival <= 1).all() and (np.diff(survival) <= 0).all()


@given(LOGITS, TEMPERATURES)
def test_temperatures_keep_the_order_of_confidences_at_a_position(logits, temperatures):
    first = np.asarray(to_survival(jnp.asarray(logits), temperatures))[:, 0]
    order = np.argsort(logits[:, 0], kind="stable")
    assert (np.diff(first[order]) >= 0).all()


def test_temperature_one_is_the_product_of_sigmoids():
    logits = jnp.asarray([[2.0, -1.0, 0.5]])
    raw = np.cumprod(1 / (1 + np.exp(-np.asarray(logits))), axis=-1)
    for temperatures in (None, (1.0, 1.0, 1.0), (1.0,) * 9, np.ones(3)):
        np.testing.assert_allclose(to_survival(logits, temperatures), raw, rtol=1e-6)


def test_static_temperatures_are_constants_of_the_program():
    logits = jnp.asarray([[2.0, -1.0], [np.inf, -np.inf]])
    np.testing.assert_allclose(jitted(logits, temperatures=(2.0, 0.5)), to_survival(logits, np.array([2.0, 0.5])))


@pytest.mark.parametrize("x", [-np.inf, -800.0, -1.0, 0.0, 1.0, 800.0, np.inf])
def test_the_hosts_sigmoid_is_exact_at_its_ends(x):
    expected = 1 / (1 + np.exp(np.longdouble(-x))) if abs(x) < 100 else float(x > 0)
    assert sigmoid(np.array(x)) == pytest.approx(float(expected), rel=1e-15, abs=1e-300)
