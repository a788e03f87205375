"""DSpark for Qwen3-4B."""

from configs._qwen3 import DSPARK, recipe

run = recipe(DSPARK, "dspark", "4B")
