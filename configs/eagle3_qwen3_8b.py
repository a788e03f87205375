"""Eagle3 for Qwen3-8B."""

from configs._qwen3 import EAGLE3, recipe

run = recipe(EAGLE3, "eagle3", "8B")
