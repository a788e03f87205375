"""Small models, and checkpoints of them on disk."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from dspark_jax.checkpoints.layout import target_layout, unfold
from dspark_jax.drafters import DrafterConfig, DSpark, Eagle3Config, MTPConfig
from dspark_jax.drafters.kinds import AnyDrafter, build_drafter
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.decoder import Decoder

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def random_weights(build):
    """A module whose every parameter is random, where fresh ones have zeros and ones too."""
    generator = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(build))
    draw = lambda shape: jnp.asarray(generator.normal(size=shape), jnp.float32)  # noqa: E731
    others = jnp.arange(1, 40, 2)  # the ids of a reduced vocabulary
    flat = [(k, v.replace(draw(v.shape) if isinstance(v, nnx.Param) else others)) for k, v in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def make_target(model_type="qwen3", **changes) -> Decoder:
    config = TargetConfig(model_type, num_layers=2, qk_norm=model_type == "qwen3", **{**SIZES, **changes})
    return random_weights(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def make_drafter(**changes) -> DSpark:
    """A drafter with every tensor a drafter can have: gated head, confidence head, reduced vocabulary."""
    options = {
        "num_layers": 1,
        "block_size": 3,
        "tap_ids": (-1, 0),
        "num_target_layers": 2,
        "mask_token_id": 39,
        "markov_rank": 4,
        "markov_head_type": "gated",
        "confidence_head": True,
        "confidence_with_markov": True,
        "draft_vocab_size": 20,
    }
    config = DrafterConfig(**{**SIZES, **options, **changes})
    return random_weights(lambda: DSpark(config, rngs=nnx.Rngs(0)))


def make_autoregressive(kind: str, **changes) -> AnyDrafter:
    """An Eagle3 ("eagle3") or MTP ("mtp") drafter with a reduced vocabulary."""
    options = {**SIZES, "block_size": 3, "num_target_layers": 2, "draft_vocab_size": 20, **changes}
    config = MTPConfig(**options) if kind == "mtp" else Eagle3Config(**options, tap_ids=(-1, 0))
    return random_weights(lambda: build_drafter(config, rngs=nnx.Rngs(0)))


def hf_config(c: TargetConfig) -> dict:
    return {
        "model_type": c.model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
        "max_position_embeddings": c.max_positions,
    }


def target_tensors(model: Decoder) -> dict[str, np.ndarray]:
    return unfold(model, target_layout(model.config))


def write(directory: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    """A directory with config.json and model.safetensors."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_target(directory: Path, model: Decoder) -> Path:
    return write(directory, hf_config(model.config), target_tensors(model))


def write_shards(directory: Path, model: Decoder) -> dict[str, dict[str, np.ndarray]]:
    """A target in two files with an index; returns what is in each file."""
    tensors = sorted(target_tensors(model).items())
    half = len(tensors) // 2
    shards = {"model-1.safetensors": dict(tensors[:half]), "model-2.safetensors": dict(tensors[half:])}
    for name, shard in shards.items():
        save_file(shard, directory / name)
    where = {tensor: name for name, shard in shards.items() for tensor in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (directory / "config.json").write_text(json.dumps(hf_config(model.config)))
    return shards


def assert_same(a: nnx.Module, b: nnx.Module) -> None:
    """Every parameter and id map is equal, bit for bit and in dtype, and so are the configs."""
    ours, theirs = nnx.to_pure_dict(nnx.state(a)), nnx.to_pure_dict(nnx.state(b))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert jax.tree.map(lambda x: x.dtype, ours) == jax.tree.map(lambda x: x.dtype, theirs)
    assert a.config == b.config
