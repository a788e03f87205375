"""Sizes of an engine."""

import dataclasses

DEFAULT_LENGTH = 2048
"""Positions of a request where nothing is said: the memory of slots grows with them."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What an engine has room for, and which programs it compiles.

    Attributes:
      slots: requests that run at once; max_waiting: that may wait besides.
      max_length: positions of a request, prompt included; 0 is the target's own limit, but at most `DEFAULT_LENGTH`.
        Fewer if all pages hold fewer.
      page_size: positions a page of the KV pool; pages: 0 is enough for all slots at full length.
      chunk: tokens of prompts a step at most.
      block_size: drafts a round; None is what the drafter was trained for.
      rows: sizes of the programs, by tokens that need logits (anchors and drafts), of which the last must hold those of
        all slots. Empty takes powers of two and the halves between. Fewer compile faster, and pad more.
    """

    slots: int = 8
    max_waiting: int = 256
    max_length: int = 0
    page_size: int = 32
    pages: int = 0
    chunk: int = 64
    block_size: int | None = None
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("slots", "page_size", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        for name in ("max_waiting", "max_length", "pages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}.")
        if list(self.rows) != sorted({*self.rows}) or (self.rows and self.rows[0] < 1):
            raise ValueError(f"rows must be 1 or more and ascend, got {self.rows}.")


def ladder(most: int, step: int = 2, halves: bool = False) -> list[int]:
    """Sizes from 1 to `most`, each `step` times the last, with those half-way between where asked for."""
    sizes, n = {1, most}, 1
    while n < most:
        n *= step
        sizes |= {min(n, most), *([min(n * 3 // 2, most)] if halves and n > 2 else [])}
    return sorted(sizes)
