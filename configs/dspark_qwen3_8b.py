"""DSpark for Qwen3-8B."""

from configs._qwen3 import DSPARK, recipe

run = recipe(DSPARK, "dspark", "8B")
