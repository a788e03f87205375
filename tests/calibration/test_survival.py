"""The function that runs inside a round: its twin, its order, its ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dspark_jax.calibration import Scaling, to_survival
from dspark_jax.calibration.survival import sigmoid, to_survival_twin

LOGITS = arrays(np.float32, (6, 4), elements=st.floats(-80, 80, width=32) | st.sampled_from([np.inf, -np.inf, 0.0]))
TEMPERATURES, SHIFTS = (st.tuples(*[st.floats(*ends)] * 4) for ends in ((0.1, 10), (-5, 5)))
SCALINGS = st.builds(Scaling, TEMPERATURES, st.just(()) | SHIFTS)

jitted = jax.jit(to_survival, static_argnames="scaling")


@given(LOGITS, st.none() | SCALINGS)
def test_it_equals_its_twin_and_never_grows(logits, scaling):
    survival = np.asarray(to_survival(jnp.asarray(logits), scaling))
    assert survival.dtype == np.float32 and not np.isnan(survival).any()
    np.testing.assert_allclose(survival, to_survival_twin(logits, scaling), rtol=5e-5, atol=1e-30)
    assert (survival >= 0).all() and (survival <= 1).all() and (np.diff(survival) <= 0).all()


@given(LOGITS, SCALINGS)
def test_a_scaling_keeps_the_order_of_confidences_at_a_position(logits, scaling):
    first = np.asarray(to_survival(jnp.asarray(logits), scaling))[:, 0]
    order = np.argsort(logits[:, 0], kind="stable")
    assert (np.diff(first[order]) >= 0).all()


def test_temperature_one_is_the_product_of_sigmoids():
    logits = jnp.asarray([[2.0, -1.0, 0.5]])
    raw = np.cumprod(1 / (1 + np.exp(-np.asarray(logits))), axis=-1)
    for scaling in (None, Scaling((1.0,) * 3), Scaling((1.0,) * 9, (0.0,) * 9)):
        np.testing.assert_allclose(to_survival(logits, scaling), raw, rtol=1e-6)


def test_a_temperature_divides_and_a_shift_is_added():
    found = to_survival(jnp.asarray([[2.0, -1.0]]), Scaling((2.0, 0.5), (0.5, 3.0)))
    np.testing.assert_allclose(found, [np.cumprod(1 / (1 + np.exp(-np.array([1.5, 1.0]))))], rtol=1e-6)


def test_a_scaling_is_a_constant_of_the_program():
    logits, scaling = jnp.asarray([[2.0, -1.0], [np.inf, -np.inf]]), Scaling((2.0, 0.5), (1.0, 0.0))
    np.testing.assert_allclose(jitted(logits, scaling=scaling), to_survival(logits, scaling))


def test_the_first_positions_of_a_scaling_stand_alone():
    scaling = Scaling((2.0, 0.5, 1.0), (1.0, 0.0, -1.0))
    assert scaling.first(2) == Scaling((2.0, 0.5), (1.0, 0.0)) and scaling.first(3) == scaling
    with pytest.raises(ValueError, match="3 temperatures for 4 draft positions"):
        scaling.first(4)


@pytest.mark.parametrize(
    ("temperatures", "shifts", "message"),
    [
        ((), (), "at least one temperature"),
        ((1.0, 0.0), (), "positive and finite"),
        ((float("nan"),), (), "positive and finite"),
        ((1.0, 1.0), (0.5,), "expected 2 shifts, one a temperature, got 1"),
        ((1.0,), (float("inf"),), "shifts must be finite"),
    ],
)
def test_what_is_no_scaling_is_refused(temperatures, shifts, message):
    with pytest.raises(ValueError, match=message):
        Scaling(temperatures, shifts)


@pytest.mark.parametrize("x", [-np.inf, -800.0, -1.0, 0.0, 1.0, 800.0, np.inf])
def test_the_hosts_sigmoid_is_exact_at_its_ends(x):
    expected = 1 / (1 + np.exp(np.longdouble(-x))) if abs(x) < 100 else float(x > 0)
    assert sigmoid(np.array(x)) == pytest.approx(float(expected), rel=1e-15, abs=1e-300)
