"""The tensors of every kind of drafter, without the target's tables and the id map."""

from dspark_jax.checkpoints.layout import Layout, Piece, block_layout
from dspark_jax.drafters.autoregressive_config import AutoregressiveConfig, Eagle3Config
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.kinds import AnyDrafterConfig


def drafter_layout(c: AnyDrafterConfig) -> Layout:
    """Layout of the drafter that a config describes."""
    if isinstance(c, DrafterConfig):
        return dspark_layout(c)
    return eagle3_layout(c) if isinstance(c, Eagle3Config) else mtp_layout(c)


def dspark_layout(c: DrafterConfig) -> Layout:
    """Layout of a released DSpark or DFlash drafter, without the frozen tables and the id map."""
    d, r = c.hidden_size, c.markov_rank
    layout = {
        "fc.weight": (Piece("fc.weight", (d, len(c.tap_ids) * d)),),
        "context_norm.scale": (Piece("hidden_norm.weight", (d,)),),
        "norm.scale": (Piece("norm.weight", (d,)),),
    }
    for i in range(c.num_layers):
        layout |= block_layout(f"layers.{i}", f"layers.{i}", c)
    if r:
        layout["markov.w1"] = (Piece("markov_head.markov_w1.weight", (c.vocab_size, r)),)
        layout["markov.w2"] = (Piece("markov_head.markov_w2.weight", (c.draft_rows, r)),)
        extra = {"gated": ("gate", r, d + r), "rnn": ("joint", 3 * r, 2 * r + d)}.get(c.markov_head_type)
        if extra:
            name, outputs, inputs = extra
            layout[f"markov.{name}.weight"] = (Piece(f"markov_head.{name}_proj.weight", (outputs, inputs)),)
            layout[f"markov.{name}.bias"] = (Piece(f"markov_head.{name}_proj.bias", (outputs,)),)
    if c.confidence_head:
        width = d + (r if c.confidence_with_markov else 0)
        layout["confidence.proj.weight"] = (Piece("confidence_head.proj.weight", (1, width)),)
        layout["confidence.proj.bias"] = (Piece("confidence_head.proj.bias", (1,)),)
    return layout


def eagle3_layout(c: AutoregressiveConfig) -> Layout:
    """Layout of a released Eagle3 drafter (DeepSpec): attention reads [embedding; state], and norms both."""
    d = c.hidden_size
    return {
        "fc.weight": (Piece("fc.weight", (d, len(c.tap_ids) * d)),),
        "hidden_norm.scale": (Piece("layers.0.hidden_norm.weight", (d,)),),
        "norm.scale": (Piece("norm.weight", (d,)),),
        **block_layout("layer", "layers.0", c, inputs=2 * d),
    }


def mtp_layout(c: AutoregressiveConfig) -> Layout:
    """Layout of an MTP drafter, under the `mtp.*` names of Qwen3-Next checkpoints; `fc` reads [embedding; state].

    There is no released layout of an MTP module apart from its target.
    """
    d = c.hidden_size
    return {
        "fc.weight": (Piece("mtp.fc.weight", (d, 2 * d)),),
        "embedding_norm.scale": (Piece("mtp.pre_fc_norm_embedding.weight", (d,)),),
        "hidden_norm.scale": (Piece("mtp.pre_fc_norm_hidden.weight", (d,)),),
        "norm.scale": (Piece("mtp.norm.weight", (d,)),),
        **block_layout("layer", "mtp.layers.0", c),
    }
