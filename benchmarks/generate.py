"""Single-stream decoding: plain against transformers on torch, speculative against plain, in one run.

    python benchmarks/generate.py --data math=gsm8k.jsonl code=mbpp.jsonl chat=mt-bench.jsonl [--torch]

Prints a table of tokens/s and ratios (medians over prompts of interleaved runs), the number of compilations, and what
the draft and verify programs move and compute, with the roofline time that implies (a projection, marked as such).
"""

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import flax
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from dspark_jax.checkpoints.layout import target_layout, unfold
from dspark_jax.cli.models import ModelOptions, prompt_ids
from dspark_jax.decoding import generate as generation
from dspark_jax.decoding.generate import Generator, Request, whole_chunks
from dspark_jax.decoding.keys import Purpose, slot_keys
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.evaluation import read_prompts

CHIPS = {"H200": (4.8e12, 989e12), "TPU v5e": (0.819e12, 197e12)}
"""Memory bandwidth in bytes/s and dense bf16 FLOP/s."""

console = Console(width=120)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Measure single-stream decoding.

    Attributes:
      data: DOMAIN=FILE pairs of {"turns": [text, ...]} JSONL.
      prompts: prompts a domain; repeats: interleaved runs a prompt; max_tokens: new tokens.
      torch: also run transformers' generate on torch (installed by hand) with the same weights.
    """

    data: tuple[str, ...]
    models: Annotated[ModelOptions, tyro.conf.OmitArgPrefixes] = dataclasses.field(default_factory=ModelOptions)
    prompts: int = 12
    repeats: int = 3
    max_tokens: int = 128
    torch: bool = False


def main(options: Benchmark) -> None:
    """Runs everything and prints the tables."""
    target, drafter = options.models.load()
    jax.config.update("jax_compilation_cache_dir", None)
    domains = read_domains(target, options)
    longest = max(len(ids) for prompts in domains.values() for ids in prompts) + options.max_tokens
    size = {"max_length": whole_chunks(longest)}
    plain = Generator(target.model, **size)
    drafts = options.models.drafts or drafter.config.block_size
    speculative = Generator(target.model, drafter, policy=options.models.policy, block_size=drafts, **size)
    runners: dict[str, Callable[[Request], list[int]]] = {
        "plain": lambda r: plain.generate([r])[0].tokens,
        "speculative": lambda r: speculative.generate([r])[0].tokens,
    }
    if options.torch:
        runners["transformers"] = torch_runner(target)
    warm = Request(next(iter(domains.values()))[0], options.max_tokens, seed=0)
    for run in runners.values():
        run(warm)
    compiled = generation._run._cache_size()
    table = Table(title=f"one stream, greedy, {options.max_tokens} tokens, median over {options.prompts} prompts")
    for column in ("domain", *(f"{name} tok/s" for name in runners), "spec / plain", "plain / transformers", "tau"):
        table.add_column(column, justify="right")
    for name, prompts in domains.items():
        rates, taus, ratios = measure(prompts, runners, speculative, options)
        row = [f"{statistics.median(rates[runner]):.1f}" for runner in runners]
        spec = f"{statistics.median(ratios['speculative']):.2f}"
        peer = f"{1 / statistics.median(ratios['transformers']):.2f}" if options.torch else "-"
        table.add_row(name, *row, spec, peer, f"{statistics.mean(taus):.2f}")
    console.print(
        f"{machine()}; target {options.models.target}, policy {options.models.policy}, {drafts} drafts a round"
    )
    console.print(table)
    recompiles(domains, plain, speculative, compiled)
    programs(target.model, drafter, drafts)


def read_domains(target, options) -> dict[str, list[list[int]]]:
    """Prompt ids by domain, a random choice."""
    domains = {}
    for pair in options.data:
        name, path = pair.split("=", 1)
        texts = read_prompts(path)
        picks = np.random.default_rng(0).permutation(len(texts))[: options.prompts]
        domains[name] = [prompt_ids(target, texts[i]) for i in picks]
    return domains


def measure(prompts, runners, speculative, options) -> tuple[dict, list[float], dict]:
    """Tokens/s of every runner, accepted lengths, and time ratios to plain decoding, per prompt."""
    rates = {name: [] for name in runners}
    ratios = {name: [] for name in runners}
    taus = []
    for ids in prompts:
        request = Request(ids, options.max_tokens, seed=0)
        taus.append(speculative.generate([request])[0].mean_accept_length)
        seconds = {name: [] for name in runners}
        for _ in range(options.repeats):
            for name, run in runners.items():
                start = time.perf_counter()
                tokens = run(request)
                seconds[name].append((time.perf_counter() - start) / len(tokens))
        middle = {name: statistics.median(times) for name, times in seconds.items()}
        for name in runners:
            rates[name].append(1 / middle[name])
            ratios[name].append(middle["plain"] / middle[name])
    return rates, taus, ratios


def recompiles(domains, plain, speculative, compiled: int) -> None:
    """Twenty prompts of mixed length and options; prints how many programs they added."""
    prompts = [ids for group in domains.values() for ids in group]
    for i in range(20):
        ids = prompts[i % len(prompts)]
        request = Request(ids, 8 + i, [0.0, 0.7, 1.0][i % 3], [0, 20][i % 2], [1.0, 0.9][i // 2 % 2], seed=i)
        plain.generate([request])
        speculative.generate([request])
    console.print(f"programs compiled for 20 mixed prompts after warm-up: {generation._run._cache_size() - compiled}")


def programs(target, drafter, drafts: int) -> None:
    """Bytes and FLOPs of one draft and of one verification of each width, from XLA's own count."""
    graph, params = nnx.split(target)
    draft_graph, draft_params = nnx.split(drafter)
    slots = 512
    head = drafter.draft_head(target)

    def draft(params, draft_params, head, cache, anchor, position, key):
        model, proposer = nnx.merge(graph, params), nnx.merge(draft_graph, draft_params)
        keys = slot_keys(key, position, Purpose.DRAFT, drafts)
        return proposer.propose(model, head, cache, anchor, position, Sampling.create(1), keys, drafts)

    def verify(params, tokens, positions, cache):
        model = nnx.merge(graph, params)
        hidden, taps, cache = model(tokens, positions, cache, drafter.config.tap_ids)
        return jnp.argmax(model.logits(hidden), axis=-1), taps, cache

    one = jnp.zeros((1,), jnp.int32)
    key = jax.random.key(0)[None]
    rows = []
    draft_args = (params, draft_params, head, drafter.create_cache(1, slots), one, one, key)
    rows.append((f"draft {drafts}", count(draft, draft_args, donate=3)))
    for width in sorted({1, 2, 4, drafts + 1}):
        shape = jnp.zeros((1, width), jnp.int32)
        rows.append((f"verify {width}", count(verify, (params, shape, shape, target.create_cache(1, slots)), donate=3)))
    table = Table(
        title=f"programs at {slots} cache slots, {target.dtype}; roofline times are projections, not measured"
    )
    for column in ("program", "MB moved", "GFLOP", *(f"{chip} (projected)" for chip in CHIPS)):
        table.add_column(column, justify="right")
    for name, (moved, flops) in rows:
        times = [max(moved / bandwidth, flops / peak) * 1e6 for bandwidth, peak in CHIPS.values()]
        table.add_row(name, f"{moved / 1e6:.1f}", f"{flops / 1e9:.3f}", *(f"{t:.0f} us" for t in times))
    console.print(table)


def count(function, arguments, donate: int) -> tuple[float, float]:
    """Bytes accessed and FLOPs of a compiled program."""
    cost = jax.jit(function, donate_argnums=donate).lower(*arguments).compile().cost_analysis()
    return cost["bytes accessed"], cost["flops"]


def torch_model(target):
    """transformers' Llama with the same float32 weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c = target.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_positions,
        rope_parameters={"rope_theta": c.rope.theta, "rope_type": "default"},
        tie_word_embeddings=c.tie_embeddings,
        eos_token_id=list(c.stop_ids),
        pad_token_id=c.stop_ids[0],
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    state = {k: torch.from_numpy(v.copy()) for k, v in unfold(target.model, target_layout(c)).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def torch_runner(target) -> Callable[[Request], list[int]]:
    """transformers' generate."""
    import torch

    model = torch_model(target)

    def run(request: Request) -> list[int]:
        ids = torch.tensor([list(request.prompt)])
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=request.max_tokens, do_sample=False, use_cache=True)
        return out[0, ids.shape[1] :].tolist()

    return run


def machine() -> str:
    """What this ran on."""
    versions = f"python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}"
    return f"{jax.devices()[0].device_kind} x{jax.device_count()}, {os.cpu_count()} cores, {versions}"


if __name__ == "__main__":
    main(tyro.cli(Benchmark))
