"""Every tensor is used exactly once, or the error names it, its file and both shapes."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.drafter import load_drafter, save_drafter
from dspark_jax.checkpoints.target import load_target
from tests.checkpoints.files import make_drafter, make_target, write_target

MODELS = {
    "qwen3": lambda path: write_target(path, make_target()),
    "llama, biases, tied": lambda path: write_target(
        path, make_target("llama", attention_bias=True, output_bias=True, mlp_bias=True, tie_embeddings=True)
    ),
    "drafter": lambda path: save_drafter(path, make_drafter(), target=make_target()),
    "drafter, rnn, no tables": lambda path: save_drafter(
        path, make_drafter(markov_head_type="rnn", draft_vocab_size=0, confidence_with_markov=False)
    ),
}


def damaged(tensors, name):
    """The tensors with one dropped, renamed, reshaped, shortened, or accompanied, and what the error must say."""
    shape = tensors[name].shape
    others = {k: v for k, v in tensors.items() if k != name}
    shown = re.escape(str(shape))
    missing = f"missing '{re.escape(name)}' \\(expected shape {shown}\\) in "
    yield others, missing
    yield {**others, name + "_": tensors[name]}, f"(?s){missing}.*unexpected '{re.escape(name)}_' of shape {shown} in "
    for wrong in (tensors[name][None], tensors[name][:-1]):
        shapes = f"has shape {re.escape(str(wrong.shape))}, expected {shown}"
        yield {**others, name: np.ascontiguousarray(wrong)}, f"'{re.escape(name)}' in \\S+model.safetensors {shapes}"
    yield {**tensors, name + "_too": tensors[name]}, f"unexpected '{re.escape(name)}_too' of shape {shown} in "


@pytest.mark.parametrize("kind", MODELS)
def test_one_tensor_dropped_renamed_reshaped_or_extra_is_an_error(tmp_path, kind):
    path = MODELS[kind](tmp_path / "model")
    load = load_drafter if "drafter" in kind else load_target
    load(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        for other, says in damaged(tensors, name):
            if load is load_target and name == "lm_head.weight" and name not in other:
                says = rf"{path}: there is no lm_head\.weight"
            if name == "t2d" and name not in other:  # these marks may be absent
                if len(other) < len(tensors):
                    continue
                says = "unexpected 't2d_'"
            save_file(other, file)
            with pytest.raises(ValueError, match=says) as error:
                load(path)
            assert str(path) in str(error.value)


def test_many_problems_are_counted_not_listed(tmp_path):
    path = write_target(tmp_path / "model", make_target())
    save_file({"x": np.zeros(2, np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps({**json.loads((path / "config.json").read_text()), "tie_word_embeddings": True})
    )
    with pytest.raises(ValueError, match=r"(?s)missing.*\.\.\. and 17 more\nCheck that config\.json belongs"):
        load_target(path)


def test_weights_that_are_no_floats_are_refused(tmp_path):
    path = write_target(tmp_path / "model", make_target())
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].astype(np.int8)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"'{name}' in \S+ is int8, expected floats"):
        load_target(path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, dtype, value):
    path = write_target(tmp_path / "model", make_target())
    tensors = {k: v.astype(dtype) for k, v in load_file(path / "model.safetensors").items()}
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][0, 1] = ml_dtypes.finfo(dtype).min
    save_file(tensors, path / "model.safetensors")
    load_target(path)
    tensors[name][-1, -1] = value
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"'{name}' in \S+model\.safetensors holds NaN or infinite.*fetch it again"):
        load_target(path)
