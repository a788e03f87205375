"""DFlash for Qwen3-8B."""

from configs._qwen3 import DFLASH, recipe

run = recipe(DFLASH, "dflash", "8B")
