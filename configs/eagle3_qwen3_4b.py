"""Eagle3 for Qwen3-4B."""

from configs._qwen3 import EAGLE3, recipe

run = recipe(EAGLE3, "eagle3", "4B")
