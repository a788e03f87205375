"""Prompts to answer, and the file that their answers are appended to."""

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.data.conversations import UnusableRow, read_opening
from train.data.files import read_rows

Name = tuple[str, int]
"""What an answer is known by: the domain and the prompt's row in its file."""
Opening = dict[str, Any]
"""`messages` to answer, and `tools` if there are any."""


def interleave(paths: Sequence[str], limit: int | None = None) -> Iterator[tuple[Name, Opening | None]]:
    """What prompt files ask, one file after the other in turn, at most `limit` in all; None where a row asks nothing.

    Raises:
      FileNotFoundError: no such file; ValueError: two files of one stem, or a row of another form.
    """
    domains = {Path(path).stem: [_opening(*row) for row in read_rows([Path(path)])] for path in paths}
    if len(domains) < len(paths):
        raise ValueError(f"a file's stem is its domain, but two of {list(paths)} share one; rename one.")
    longest = max(map(len, domains.values()), default=0)
    asked = (((d, i), rows[i]) for i in range(longest) for d, rows in domains.items() if i < len(rows))
    return (each for _, each in zip(range(longest * len(domains) if limit is None else limit), asked, strict=False))


def _opening(place: str, row: dict[str, Any]) -> Opening | None:
    try:
        return read_opening(row)
    except UnusableRow:
        return None
    except ValueError as error:
        raise ValueError(f'{place} is not {{"turns": [text, ...]}} or {{"messages": [...]}} ({error}).') from error


def read_answers(path: Path, settings: Mapping[str, Any]) -> dict[Name, Any]:
    """What the answers in `path` answer, token ids or messages; a half-written last line is cut off the file.

    Raises:
      ValueError: a row of another form or of other settings than these, with its line.
    """
    if not path.is_file():
        return {}
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)
    answered = {}
    for number, line in enumerate(text[:whole].split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            answered[row["domain"], row["index"]] = row["prompt"] if "prompt" in row else row["messages"][:-1]
            there = dict(row.get("settings") or {})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}:{number} is not {{"domain", "index", "prompt", "answer"}} or {{"domain", "index", '
                f'"messages"}} ({error}); choose another --out.'
            ) from error
        fields = sorted(there.keys() | settings.keys())
        if changed := {k: (there.get(k), settings.get(k)) for k in fields if there.get(k) != settings.get(k)}:
            raise ValueError(
                f"{path}:{number} was answered with other settings (field: (there, here)): {changed}. Give the same "
                "ones, or choose another --out. Rows of versions that kept no settings (None) are not added to."
            )
    return answered


def request_seed(seed: int, domain: str, index: int) -> int:
    """Seed of one answer's draws, the same whenever it is asked for."""
    return zlib.crc32(f"{seed} {domain} {index}".encode()) & 0x7FFFFFFF
