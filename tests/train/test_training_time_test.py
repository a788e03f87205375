"""Training-time test of Eagle3 against numbers of the reference's model, at every position of random documents."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.checkpoints.drafter_layouts import drafter_layout
from dspark_jax.checkpoints.layout import unfold
from train.losses import LossWeights
from train.step import TokenBatch, drafter_loss, target_features

TOLERANCE = 1e-4
LOSS = 7.012282
GRADIENT_NORMS = {
    "fc.weight": 3.289675,
    "layers.0.hidden_norm.weight": 0.137338,
    "layers.0.input_layernorm.weight": 0.1183483,
    "layers.0.mlp.down_proj.weight": 0.8960306,
    "layers.0.mlp.gate_proj.weight": 0.6324932,
    "layers.0.mlp.up_proj.weight": 0.6858183,
    "layers.0.post_attention_layernorm.weight": 0.1198975,
    "layers.0.self_attn.k_norm.weight": 0.03715385,
    "layers.0.self_attn.k_proj.weight": 0.550244,
    "layers.0.self_attn.o_proj.weight": 0.7927005,
    "layers.0.self_attn.q_norm.weight": 0.03647497,
    "layers.0.self_attn.q_proj.weight": 0.544385,
    "layers.0.self_attn.v_proj.weight": 1.203204,
    "norm.weight": 0.3303536,
}
"""The public PyTorch model of Eagle3, run 5 steps on its own states with the golden weights, on the tokens below; the
loss is the mean cross-entropy to the target's distribution, step k weighing 0.8^k, over anchors 1 to 34."""


def test_loss_and_gradients_equal_the_reference(golden):
    case = golden("qwen3_eagle3")
    target, drafter = case.target, case.drafter
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 319, (2, 40)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(40), tokens.shape)
    batch = TokenBatch(tokens, jnp.ones(tokens.shape, bool), positions, jnp.zeros_like(tokens))
    anchors = jnp.broadcast_to(jnp.arange(1, 35), (2, 34))
    graph, params, rest = nnx.split(drafter, nnx.Param, ...)

    def loss(params):
        features = target_features(target, batch, drafter.config.tap_ids)
        weights = LossWeights.training_time_test(drafter.config.step_decay)
        trained = nnx.merge(graph, params, rest)
        return drafter_loss(trained, target, batch, *features, anchors, anchors > 0, weights, chunk=64)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, LOSS, atol=TOLERANCE)
    gradients = unfold(nnx.merge(graph, gradient, rest), drafter_layout(drafter.config))
    assert gradients.keys() == GRADIENT_NORMS.keys()
    for name, norm in GRADIENT_NORMS.items():
        np.testing.assert_allclose(np.linalg.norm(gradients[name]), norm, rtol=TOLERANCE, err_msg=name)
