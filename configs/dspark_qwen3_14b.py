"""DSpark for Qwen3-14B."""

from configs._qwen3 import DSPARK, recipe

run = recipe(DSPARK, "dspark", "14B")
