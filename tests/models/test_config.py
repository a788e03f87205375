"""Target configs from Hugging Face files."""

import dataclasses

import pytest

from dspark_jax.models.config import TargetConfig, token_ids, window_of

HF = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "eos_token_id": [3, 1],
}


def test_config_is_read_with_its_defaults():
    c = TargetConfig.from_hf(HF)
    assert (c.num_tokens, c.stop_ids, c.qk_norm, c.group_size, c.tie_embeddings) == (40, (1, 3), True, 2, False)
    bare = {k: v for k, v in HF.items() if k not in ("num_key_value_heads", "head_dim", "eos_token_id")}
    c = TargetConfig.from_hf({**bare, "model_type": "llama"})
    assert (c.num_kv_heads, c.head_dim, c.stop_ids, c.qk_norm) == (4, 4, (), False)


def test_stop_ids_that_are_no_tokens_are_left_out():
    c = TargetConfig.from_hf({**HF, "eos_token_id": [-1, 0, 39, 40, 1000]})
    assert c.stop_ids == (0, 39)
    assert dataclasses.replace(c, num_tokens=37).stop_ids == (0,)


def test_nested_text_config_is_read():
    c = TargetConfig.from_hf({"model_type": "outer", "text_config": {**HF, "tie_word_embeddings": True}})
    assert c.tie_embeddings and c.hidden_size == 16


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"vocab_size": None, "hidden_size": None}, r"lacks \['vocab_size', 'hidden_size'\]"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "must be even"),
        ({"sliding_window": 64, "use_sliding_window": True}, r"sliding-window attention \(64\)"),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"sliding_window": 64, "layer_types": 2}, "layer_types is 2, expected a list"),
        ({"vocab_size": "40"}, r"config\.json: vocab_size is '40', expected a whole number of at least 1\."),
        ({"hidden_size": 16.0}, "hidden_size is 16.0, expected a whole"),
        ({"intermediate_size": 0}, "intermediate_size is 0, expected a whole"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected a whole"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0, expected a whole"),
        ({"num_key_value_heads": [2]}, r"num_key_value_heads is \[2\], expected a whole"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected a whole"),
        ({"head_dim": []}, r"head_dim is \[\], expected a whole"),
        ({"head_dim": None, "num_attention_heads": 32}, "head_dim is 0, expected a whole"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None, expected a whole"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None, expected a number of at least 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number"),
        ({"attention_bias": "false"}, "attention_bias is 'false', expected true or false"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"text_config": [1]}, r"text_config is \[1\], expected an object"),
        ({"rope_scaling": ["linear"]}, r"rope_scaling is \['linear'\], expected an object"),
        ({"eos_token_id": "3"}, "eos_token_id is '3', expected a whole number"),
        ({"eos_token_id": {"id": 3}}, r"eos_token_id is \{'id': 3\}, expected a whole number"),
        ({"eos_token_id": [3, 1.5]}, r"eos_token_id is 1\.5, expected a whole number"),
    ],
)
def test_config_that_cannot_be_run_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        TargetConfig.from_hf({**HF, **change})


def test_window_that_is_off_is_off():
    assert not window_of({"sliding_window": None, "use_sliding_window": True})
    assert not window_of({"sliding_window": 64, "use_sliding_window": False, "layer_types": ["sliding_attention"]})
    assert not window_of({"sliding_window": 64, "layer_types": ["full_attention"]})


def test_ids_come_as_one_many_or_none():
    assert (token_ids(None), token_ids(7), token_ids([9, 7, 9])) == ((), (7,), (7, 9))
