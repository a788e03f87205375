"""Targets in Hugging Face directories: heads, stop ids, vocabularies, shards."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from dspark_jax.checkpoints.target import load_target
from tests.checkpoints.files import (
    assert_same,
    hf_config,
    make_target,
    target_tensors,
    write,
    write_shards,
    write_target,
)


@pytest.fixture(scope="module")
def model():
    return make_target()


def test_parameters_are_those_of_the_file_in_the_dtype_asked_for(tmp_path, model):
    path = write_target(tmp_path / "m", model)
    assert_same(load_target(path, dtype=jnp.float32).model, model)
    names = []
    loaded = load_target(path, dtype=jnp.bfloat16, place=lambda name, array: names.append(name) or jnp.asarray(array))
    assert loaded.model.dtype == jnp.bfloat16
    assert "layers.1.attention.qkv.weight" in names and len(names) == len(set(names)) == 19
    half = {k: v.astype(ml_dtypes.bfloat16) for k, v in target_tensors(model).items()}
    assert_same(
        load_target(write(tmp_path / "h", hf_config(model.config), half), dtype=jnp.bfloat16).model, loaded.model
    )


@pytest.mark.parametrize("flags", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_head_is_the_embedding_when_the_file_has_none_and_a_flag_says_so(tmp_path, model, flags):
    tensors = target_tensors(model)
    del tensors["lm_head.weight"]
    plain = {k: v for k, v in hf_config(model.config).items() if k != "tie_word_embeddings"}
    for config in ({**plain, **flags}, {"tie_word_embeddings": False, **plain, **flags}):
        loaded = load_target(write(tmp_path / "m", config, tensors)).model
        assert loaded.head is None and loaded.config.tie_embeddings
        np.testing.assert_array_equal(loaded.head_weight, model.embedding[...])
    with pytest.raises(ValueError, match="tie_word_embeddings is not set, so there is no head"):
        load_target(write(tmp_path / "m", plain, tensors))


def test_head_in_the_file_wins_over_the_flag(tmp_path, model):
    config = {**hf_config(model.config), "tie_word_embeddings": True}
    loaded = load_target(write(tmp_path / "m", config, target_tensors(model))).model
    np.testing.assert_array_equal(loaded.head_weight, model.head_weight)
    assert not np.array_equal(loaded.head_weight, loaded.embedding[...])


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (None, None, None, ()),
        (3, None, None, (3,)),
        ([3, 4], 5, None, (3, 4, 5)),
        (3, [5, 6], "<eos>", (3, 5, 6, 36)),
        (None, {}, {"content": "<eos>"}, (36,)),
        ([3, -1], [0, 1000], None, (0, 3)),
        (37, [5, 40], "<eos>", (5, 36)),
    ],
)
def test_stop_ids_are_those_of_config_generation_config_and_tokenizer(
    tmp_path, model, config, generation, tokenizer, expected
):
    path = write(tmp_path / "m", {**hf_config(model.config), "eos_token_id": config}, target_tensors(model))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation} if generation else {}))
    if tokenizer is not None:
        words = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(36)}, "<eos>": 36}, unk_token="w0"))
        words.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
    c = load_target(path).config
    assert c.stop_ids == expected
    assert c.num_tokens == (40 if tokenizer is None else 37)


def test_shards_load_like_one_file(tmp_path, model):
    write_shards(tmp_path, model)
    assert_same(load_target(tmp_path).model, model)


def test_missing_or_cut_shard_and_wrong_index_are_named(tmp_path, model):
    shards = write_shards(tmp_path, model)
    index, second = tmp_path / "model.safetensors.index.json", tmp_path / "model-2.safetensors"
    whole, where = second.read_bytes(), json.loads(index.read_text())["weight_map"]
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        second.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"model-2\.safetensors is not a whole safetensors file.*fetch it again"):
            load_target(tmp_path)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks shards \['model-2\.safetensors'\]"):
        load_target(tmp_path)
    second.write_bytes(whole)
    index.write_text(json.dumps({"weight_map": {**where, "model.norm.weight": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match=r"index\.json and its shards disagree about \['model\.norm\.weight'"):
        load_target(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match=r"stands in both model-1\.safetensors and model-2"):
        load_target(tmp_path)
    broken_indices = [
        ('{"weight_map": {', "is not whole JSON"),
        ("{}", "has no weight_map"),
        ("[]", "JSON list"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": ["b"]}}', "has no weight_map"),
    ]
    for broken, says in broken_indices:
        index.write_text(broken)
        with pytest.raises(ValueError, match=rf"index\.json.*{says}"):
            load_target(tmp_path)
    assert len(shards) == 2


def test_tensor_missing_from_all_shards_is_reported_with_their_directory(tmp_path, model):
    write_shards(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    with pytest.raises(ValueError, match=rf"missing 'model\.layers\.0\.self_attn\.k_proj\.bias' .* in {tmp_path}\n"):
        load_target(tmp_path)


def test_directory_without_config_or_weights_is_an_error(tmp_path, model):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model.config))[:-1])
    with pytest.raises(ValueError, match=r"config\.json is not whole JSON"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model.config)))
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_target(tmp_path)
