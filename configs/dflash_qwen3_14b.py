"""DFlash for Qwen3-14B."""

from configs._qwen3 import DFLASH, recipe

run = recipe(DFLASH, "dflash", "14B")
