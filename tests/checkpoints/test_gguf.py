"""GGUF targets against the same model in safetensors."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from dspark_jax.checkpoints.gguf_file import LAYER_NAMES, NAMES
from dspark_jax.checkpoints.target import load_target, load_tokenizer
from dspark_jax.models.rope import RopeConfig
from tests.checkpoints.files import assert_same, make_target, target_tensors

MERGES = [("Ġ", "a"), ("n", "d"), ("Ġa", "nd")]
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES), "<|end|>", "<think>"]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SHAPE = {"vocab_size": 264, "num_tokens": 261, "rope": RopeConfig(theta=5e4), "max_positions": 77}


def interleave(w, heads):
    """What llama.cpp's converter does to the rows of Llama's q and k."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def gguf_name(name):
    for short, long in NAMES.items():
        if name == long:
            return short
    _, _, layer, *middle, kind = name.split(".")
    short = next(k for k, v in LAYER_NAMES.items() if v == ".".join(middle))
    return f"blk.{layer}.{short}.{kind}"


def write_gguf(path, model, pre="smollm", tensors=None, quantised=None, skip=(), architecture=None, **fields) -> Path:
    """A GGUF of a model; fields replace metadata, and `skip` leaves some out."""
    c, a = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, architecture or a)
    numbers = {
        f"{a}.embedding_length": c.hidden_size,
        f"{a}.feed_forward_length": c.intermediate_size,
        f"{a}.block_count": c.num_layers,
        f"{a}.attention.head_count": c.num_heads,
        f"{a}.attention.head_count_kv": c.num_kv_heads,
        f"{a}.attention.key_length": c.head_dim,
        f"{a}.rope.dimension_count": c.head_dim,
        f"{a}.context_length": c.max_positions,
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|end|>"),
        **fields,
    }
    for key, value in numbers.items():
        if key not in skip:
            writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    pads = c.vocab_size - len(TOKENS)
    writer.add_token_list(TOKENS + [f"[PAD{i}]" for i in range(pads)])
    kinds = {"<|end|>": CONTROL, "<think>": USER_DEFINED}
    writer.add_token_types([kinds.get(t, NORMAL) for t in TOKENS] + [UNUSED] * pads)
    writer.add_token_merges([" ".join(m) for m in MERGES])
    writer.add_chat_template("{{ messages[0].content }}{{ eos_token }}")
    for name, array in (target_tensors(model) if tensors is None else tensors).items():
        if a == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleave(array, c.num_heads if "q_proj" in name else c.num_kv_heads)
        short = name if name == "rope_freqs.weight" else gguf_name(name)
        if quantised and array.ndim == 2:
            writer.add_tensor(short, gguf.quants.quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(short, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama():
    return make_target("llama", stop_ids=(259,), **SHAPE)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "qwen3"},
        {"model_type": "llama"},
        {"model_type": "llama", "tie_embeddings": True, "attention_bias": True, "output_bias": True, "mlp_bias": True},
    ],
)
def test_gguf_is_the_model_it_was_made_of(tmp_path, options):
    model = make_target(stop_ids=(259,), rms_norm_eps=1e-5, **SHAPE, **options)
    loaded = load_target(write_gguf(tmp_path / "m.gguf", model)).model
    assert loaded.config.num_tokens == 261  # the three padding rows are none
    assert_same(loaded, model)


def test_quantised_tensors_are_dequantised(tmp_path):
    model = make_target("llama", **{**SHAPE, "hidden_size": 32, "intermediate_size": 32})
    loaded = load_target(write_gguf(tmp_path / "m.gguf", model, quantised=gguf.GGMLQuantizationType.Q8_0)).model
    for ours, theirs in zip(target_tensors(loaded).values(), target_tensors(model).values(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.03)


def test_any_cut_file_is_an_error_that_names_it(tmp_path, llama):
    path = write_gguf(tmp_path / "m.gguf", llama)
    whole = path.read_bytes()
    last = len(whole) - len(whole) % 32 - 32  # behind it there may be padding only
    for cut in [*range(0, 64, 3), *np.linspace(64, last, 25).astype(int)]:
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"m\.gguf is not a whole GGUF file .* fetch it again"):
            load_target(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported; expected llama or qwen3"),
        ({"skip": ["llama.block_count"]}, r"lacks the metadata 'llama\.block_count'"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of 8 dimensions"),
        ({"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
        ({"pre": "gemma4"}, r"pre-tokenizer 'gemma4' is not supported"),
        ({"llama.embedding_length": 32}, r"'lm_head\.weight' in \S+ has shape \(264, 16\), expected \(264, 32\)"),
        ({"llama.attention.head_count": 0}, r"m\.gguf: llama\.attention\.head_count is 0, expected a whole"),
        ({"llama.block_count": "two"}, r"llama\.block_count is 'two', expected a whole"),
        ({"tokenizer.ggml.eos_token_id": 261}, r"ggml\.eos_token_id is 261, expected a whole number within 0\.\.260"),
        ({"tokenizer.ggml.bos_token_id": 2**31}, r"ggml\.bos_token_id is 2147483648, expected a whole"),
        ({"tensors": {}}, r"missing 'model\.embed_tokens\.weight'"),
    ],
)
def test_gguf_that_cannot_be_run_is_refused(tmp_path, llama, change, says):
    path = write_gguf(tmp_path / "m.gguf", llama, **change)
    with pytest.raises(ValueError, match=says):
        load_target(path)


def test_tensor_of_no_decoder_and_scaled_frequencies_are_refused(tmp_path, llama):
    tensors = target_tensors(llama)
    path = write_gguf(tmp_path / "f.gguf", llama, tensors={**tensors, "rope_freqs.weight": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match="with rope_freqs is not supported"):
        load_target(path)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"'blk\.0\.ffn_gate_exps\.weight' in \S+x\.gguf is not part"):
        load_target(tmp_path / "x.gguf")


def test_unknown_quantisation_is_an_error(tmp_path, llama, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", llama)

    def refuse(data, kind):
        raise NotImplementedError("IQ9 is not yet implemented")

    monkeypatch.setattr(gguf.quants, "dequantize", refuse)
    with pytest.raises(ValueError, match="IQ9 is not yet implemented; use another quantisation"):
        load_target(path)


def test_linear_and_yarn_scaling_are_read(tmp_path, llama):
    fields = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 32}
    path = write_gguf(tmp_path / "m.gguf", llama, skip=["llama.rope.scaling.factor"], **fields)
    with pytest.raises(ValueError, match=r"'yarn' needs \['factor'\]"):
        load_target(path)
    fields |= {"llama.rope.scaling.factor": 4}
    rope = load_target(write_gguf(tmp_path / "n.gguf", llama, **fields)).config.rope
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32.0}
    assert (rope.kind, dict(rope.scaling)) == ("yarn", scaling)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "a and 12 and<think>", ["a", "Ġand", "Ġ", "1", "2", "Ġand", "<think>"]),
        ("qwen2", "a and 12<|end|>n\nd", ["a", "Ġand", "Ġ", "1", "2", "<|end|>", "n", "Ċ", "d"]),
    ],
)
def test_tokenizer_splits_like_its_kind(tmp_path, pre, text, expected):
    model = make_target("qwen3", **SHAPE)
    path = write_gguf(tmp_path / "m.gguf", model, pre=pre)
    tokenizer = load_target(path).tokenizer
    assert load_tokenizer(path).tokenizer.to_str() == tokenizer.tokenizer.to_str()
    assert [TOKENS[i] for i in tokenizer.encode(text)] == expected
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|end|>", "")
    assert tokenizer.render([{"content": "x"}]) == "x<|end|>" and tokenizer.num_tokens == 261
    decomposed = "e\u0301"
    assert (tokenizer.encode(decomposed) == tokenizer.encode("é")) == (pre == "qwen2")


def test_stop_ids_are_the_end_of_text_and_the_end_of_turn(tmp_path, llama):
    path = write_gguf(tmp_path / "m.gguf", llama, **{"tokenizer.ggml.eot_token_id": 7})
    assert load_target(path).config.stop_ids == (7, 259)
    path = write_gguf(tmp_path / "n.gguf", llama, skip=["tokenizer.ggml.eos_token_id"])
    assert load_target(path).config.stop_ids == ()
