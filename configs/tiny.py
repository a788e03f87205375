"""Everything on a CPU in seconds, with a small random target:

python -m configs.tiny
python -m train.regenerate --target runs/tiny/target --prompts runs/tiny/sums.jsonl --out runs/tiny/answers.jsonl \
    --max-tokens 40 --max-length 128 --rows 8
python -m train.tokenize configs/tiny.py --show 1
python -m train configs/tiny.py
dspark evaluate runs/tiny/sums.jsonl --target runs/tiny/target --drafter runs/tiny/drafter --max-tokens 40
"""

import json
from pathlib import Path

import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from dspark_jax.checkpoints.layout import target_layout, unfold
from dspark_jax.models.config import TargetConfig
from dspark_jax.models.decoder import Decoder
from train.config import RunConfig

run = RunConfig(
    out="runs/tiny",
    data=("runs/tiny/answers.jsonl",),
    target="runs/tiny/target",
    num_layers=1,
    block_size=4,
    tap_ids=(0, 1),
    mask_token_id=47,
    markov_rank=8,
    draft_vocab_size=32,
    seq_len=128,
    batch_size=2,
    num_anchors=16,
    chunk=48,
    steps=40,
    learning_rate=3e-3,
    checkpoint_every=10,
    log_every=5,
)

SPECIAL = ("<end>", "<user>", "<assistant>")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
TARGET = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}


def write_target(directory: str | Path, seed: int = 0) -> None:
    """Writes a random target of 40 tokens and 48 rows, with a tokenizer of single characters."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = TargetConfig.from_hf(TARGET)
    tensors = unfold(Decoder(config, rngs=nnx.Rngs(seed)), target_layout(config))
    # Sharper than at random, so that there is something to learn.
    tensors["lm_head.weight"] = 3 * tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 "
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate([*SPECIAL, *characters])}, []))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(TARGET))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0], "chat_template": TEMPLATE}))


def write_prompts(path: str | Path, count: int = 24, seed: int = 0) -> None:
    """Writes prompts in the form that `train.regenerate` and `dspark evaluate` read."""
    numbers = np.random.default_rng(seed).integers(100, size=(count, 2)).tolist()
    Path(path).write_text("".join(json.dumps({"turns": [f"what is {a} plus {b}"]}) + "\n" for a, b in numbers))


if __name__ == "__main__":
    write_target(run.target)
    write_prompts("runs/tiny/sums.jsonl")
