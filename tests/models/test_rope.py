"""RoPE: frequencies against numbers worked out by hand, and every place a config may keep its parameters."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.rope import RopeConfig, rotate, rotation

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("theta", "parameters", "expected", "attention"),
    [
        (1e4, {}, [1, 0.1, 0.01, 0.001], 1),
        (1e4, {"rope_type": "linear", "factor": 2.0}, [0.5, 0.05, 0.005, 0.0005], 1),
        # Wavelengths 6.28, 199, 6283 and 198692: two kept, one between 8192/4 and 8192/1, one divided by 8. Between,
        # s = (8192/6283.185 - 1) / (4 - 1) = 0.1012659, and (1 - s) * 0.001/8 + s * 0.001 = 0.00021360754.
        (1e6, LLAMA3, [1, 0.031622777, 0.00021360754, 3.9528471e-06], 1),
        # 32 turns end at dimension 8 ln(4096/(64 pi)) / (2 ln 1e4) = 1.309, one turn at 2.814: the ramp is 1..3.
        (1e4, YARN, [1, 0.1, 0.01 * (0.5 / 4 + 0.5), 0.001 / 4], 1.1386294),
        # Without rounding, the ramp at dimension 2 is (2 - 1.3090301) / (2.8141801 - 1.3090301) = 0.4590705.
        (1e4, {**YARN, "truncate": False}, [1, 0.1, 0.01 * (0.4590705 / 4 + 0.5409295), 0.001 / 4], 1.1386294),
        (1e4, {**YARN, "attention_factor": 0.5}, [1, 0.1, 0.00625, 0.00025], 0.5),
        (1e4, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, [1, 0.1, 0.00625, 0.00025], 1.1386294 / 1.0693147),
        # 652 turns end at dimension 0, a billionth of a turn far beyond the cap of 7: the ramp is i / 7.
        (
            1e4,
            {**YARN, "beta_fast": 4096 / (2 * np.pi), "beta_slow": 1e-9},
            [1, 0.1 * (1 - 0.75 / 7), 0.01 * (1 - 1.5 / 7), 0.001 * (1 - 2.25 / 7)],
            1.1386294,
        ),
    ],
)
def test_frequencies_are_those_of_the_published_formulas(theta, parameters, expected, attention):
    rope = RopeConfig.from_hf({"rope_parameters": {"rope_theta": theta, **parameters}})
    found, factor = rope.frequencies(8)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert factor == pytest.approx(attention, rel=1e-6)


def test_rotation_turns_the_two_halves_of_a_head_by_the_position():
    rope = RopeConfig(theta=1e4)
    x = jnp.array([1.0, 0.0, 0.0, 2.0])  # pairs (1, 0) and (0, 2), of frequencies 1 and 0.01
    turned = rotate(x[None, None], *rotation(rope, 4, jnp.array([3])))[0, 0]
    np.testing.assert_allclose(turned, [np.cos(3), -2 * np.sin(0.03), np.sin(3), 2 * np.cos(0.03)], rtol=1e-6)
    cos, _ = rotation(RopeConfig.from_hf({"rope_parameters": YARN}), 4, jnp.array([0]))
    np.testing.assert_allclose(cos, 1.1386294, rtol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
        {"rope_scaling": {"rope_theta": 500000, "type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}, "rope_scaling": None},
        {"rope_theta": 500000, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_parameters_are_read_from_every_place(config):
    assert RopeConfig.from_hf(config) == RopeConfig(theta=5e5, kind="linear", scaling=(("factor", 2.0),))


def test_parameters_survive_writing():
    for parameters in ({}, LLAMA3, YARN):
        rope = RopeConfig.from_hf({"rope_theta": 7e4, "rope_scaling": parameters})
        assert RopeConfig.from_hf({"rope_theta": rope.theta, "rope_parameters": rope.to_hf()}) == rope


def test_yarn_extends_the_whole_window_unless_it_says_otherwise():
    rope = RopeConfig.from_hf({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert rope == RopeConfig.from_hf({"rope_parameters": YARN})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, r"needs \['factor'\]"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "low_freq_factor"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta as 10000.0 and as 1000000.0"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "rope_type as yarn and as default"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 1"),
        ({"rope_theta": "1e4"}, r"\{'rope_theta': '1e4'\} are not supported; expected numbers"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0, expected a number above 0"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast is 0, expected a number above 0"),
        ({"rope_scaling": {"type": ["linear"]}}, "not supported; expected one of"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "high_freq_factor is 1, expected more than"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section.*expected numbers"),
    ],
)
def test_what_cannot_be_followed_is_refused(config, says):
    with pytest.raises(ValueError, match=says):
        RopeConfig.from_hf(config)
