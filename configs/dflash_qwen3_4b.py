"""DFlash for Qwen3-4B."""

from configs._qwen3 import DFLASH, recipe

run = recipe(DFLASH, "dflash", "4B")
