"""Requests on one device and on eight, in a process of its own that prints both as JSON."""

import json

import jax
from flax import nnx

from dspark_jax import Decoder, DrafterConfig, DSpark, TargetConfig
from dspark_jax.sharding import make_mesh, shardings
from serve.engine.config import EngineConfig
from serve.engine.engine import ServeEngine
from tests.serve.engine.conftest import collect, mixed, tokens_of

SHAPE = dict(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=8
)  # fmt: skip
CONFIG = EngineConfig(slots=3, max_length=96, page_size=8, chunk=16, rows=(12,))


def main() -> None:
    target = Decoder(TargetConfig(model_type="qwen3", num_tokens=37, qk_norm=True, **SHAPE), rngs=nnx.Rngs(0))
    config = DrafterConfig(
        **SHAPE, block_size=3, tap_ids=(-1, 0), num_target_layers=2, mask_token_id=39, markov_rank=4,
        confidence_head=True, confidence_with_markov=True,
    )  # fmt: skip
    drafter = DSpark(config, rngs=nnx.Rngs(1))
    found = []
    for devices in (1, 8):
        mesh = make_mesh((1, 1, devices), jax.devices()[:devices]) if devices > 1 else None
        if mesh is not None:
            for model in (target, drafter):
                state = nnx.state(model)
                nnx.update(model, jax.device_put(state, shardings(state, mesh)))
        engine = ServeEngine(target, drafter, CONFIG, mesh=mesh)
        engine.warm_up(repeats=1)
        engine.start()
        requests = mixed(6, seed=1) + mixed(4, seed=2, temperature=6.0)
        programs = engine.runner.programs
        outputs = collect(engine, requests)
        engine.stop()
        pages = engine.runner._slots.pages[0].sharding
        found.append({
            "tokens": [tokens_of(each) for each in outputs],
            "accepted": sum(each[-1].usage.accepted for each in outputs),
            "devices": len(pages.device_set),
            "split": str(getattr(pages, "spec", None)),
            "compiled": engine.runner.programs - programs,
        })  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
