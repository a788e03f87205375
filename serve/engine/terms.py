"""From a request to the arrays the device keeps of it."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.generate import check_request, stop_ids_of
from dspark_jax.decoding.keys import request_keys
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.models.config import TargetConfig
from serve.engine.request import TOP, ServeRequest
from serve.engine.state import BIASES, STOPS, Terms


def check(request: ServeRequest, config: TargetConfig, max_length: int) -> None:
    """Checks that a request can ever run.

    Raises:
      ValueError: it cannot.
    """
    check_request(request, config, max_length)
    Sampling.create(1, request.temperature, request.top_k, request.top_p, request.min_p)
    stops = stop_ids_of(request, config)
    if len(stops) > STOPS:
        raise ValueError(f"stop_ids may be {STOPS} at most, those of the model included; got {len(stops)}.")
    for name, low, high in (("presence_penalty", -2, 2), ("frequency_penalty", -2, 2)):
        if not low <= getattr(request, name) <= high:
            raise ValueError(f"{name} must be within {low}..{high}, got {getattr(request, name)}.")
    if not 0 < request.repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty must be above 0, got {request.repetition_penalty}.")
    if len(request.logit_bias) > BIASES:
        raise ValueError(f"logit_bias may name {BIASES} tokens at most, got {len(request.logit_bias)}.")
    for token, bias in request.logit_bias.items():
        if not 0 <= token < config.num_tokens or not -100 <= bias <= 100:
            raise ValueError(
                f"logit_bias must be within -100..100 for ids within 0..{config.num_tokens - 1}, got {token}: {bias}."
            )
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise ValueError(f"min_tokens must be within 0..max_tokens {request.max_tokens}, got {request.min_tokens}.")
    if request.logprobs is not None and not 0 <= request.logprobs <= TOP:
        raise ValueError(f"logprobs must be within 0..{TOP}, got {request.logprobs}.")


def terms_of(request: ServeRequest, config: TargetConfig, limit: int, seed: int) -> Terms:
    """The terms of a request that was checked, and ends at a length of `limit`; `seed` is its own or a fresh one."""
    n = len(request.prompt)
    stops = np.full(STOPS, -1, np.int32)
    wanted = stop_ids_of(request, config)
    stops[: len(wanted)] = wanted
    ids, bias = np.full(BIASES, -1, np.int32), np.zeros(BIASES, np.float32)
    ids[: len(request.logit_bias)] = list(request.logit_bias)
    bias[: len(request.logit_bias)] = list(request.logit_bias.values())
    sampling = Sampling.create(1, request.temperature, request.top_k, request.top_p, request.min_p)
    return Terms(
        prompt_length=jnp.int32(n),
        limit=jnp.int32(limit),
        min_length=jnp.int32(n + request.min_tokens),
        keys=request_keys([seed])[0],
        sampling=jax.tree.map(lambda x: x[0], sampling),
        stop_ids=jnp.asarray(stops),
        presence=jnp.float32(request.presence_penalty),
        frequency=jnp.float32(request.frequency_penalty),
        repetition=jnp.float32(request.repetition_penalty),
        bias_ids=jnp.asarray(ids),
        bias=jnp.asarray(bias),
        logprobs=jnp.asarray(request.logprobs is not None),
        speculative=jnp.asarray(request.speculative),
    )
