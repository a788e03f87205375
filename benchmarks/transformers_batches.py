"""transformers on torch, 8 prompts at a time: tokens/s of static batching, as one line of JSON.

Reads {"model": as --target, "prompts": [text, ...], "max_tokens": n} from stdin; run by `benchmarks.serve`, in a Python
with torch and transformers.
"""

import json
import sys
import time

import torch
from transformers import GenerationConfig

from benchmarks.generate import torch_model
from dspark_jax.checkpoints.target import load_target
from dspark_jax.cli.models import prompt_ids

BATCH = 8


def main(model: str, prompts: list[str], max_tokens: int) -> float:
    """Tokens/s, greedy, behind a warm-up."""
    target = load_target(model)
    ids, stops = [prompt_ids(target, text) for text in prompts], set(target.config.stop_ids)
    llama = torch_model(target)
    config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=sorted(stops), pad_token_id=min(stops)
    )

    def run(ids: list[list[int]]) -> int:
        """Batches one after the other, padded on the left; what is behind a stop token does not count."""
        count = 0
        for batch in (ids[i : i + BATCH] for i in range(0, len(ids), BATCH)):
            width = max(map(len, batch))
            padded = torch.tensor([[config.pad_token_id] * (width - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
            for row in llama.generate(padded, attention_mask=mask, generation_config=config)[:, width:].tolist():
                count += next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        return count

    with torch.inference_mode():
        run(ids[:2])
        start = time.perf_counter()
        return run(ids) / (time.perf_counter() - start)


if __name__ == "__main__":
    print(json.dumps(main(**json.load(sys.stdin))))
