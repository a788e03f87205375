"""Rows of data files, each with the place it stands at."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

KINDS = (".jsonl", ".jsonl.gz", ".parquet")


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files named, and those of directories named, by name at any depth.

    Raises:
      FileNotFoundError: no such file, or a directory without data; ValueError: a file of another kind.
    """
    files = []
    for path in map(Path, paths):
        found = sorted(f for f in path.rglob("*") if f.name.endswith(KINDS)) if path.is_dir() else [path]
        if not path.exists() or not found:
            raise FileNotFoundError(
                f"{path} {'holds no' if path.exists() else 'is no file or directory of'} {', '.join(KINDS)}; of a data "
                "set on the hub, fetch the files first: hf download OWNER/NAME --repo-type dataset --local-dir DIR."
            )
        files += found
    if wrong := [str(f) for f in files if not f.name.endswith(KINDS)]:
        raise ValueError(
            f"{wrong} are not {', '.join(KINDS)}; convert them, for instance with to_json(lines=True) of pandas or "
            "to_parquet of datasets."
        )
    return files


def read_rows(files: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its place, FILE:LINE or FILE:ROW, in order.

    Raises:
      ValueError: a line is no JSON object, or a Parquet file cannot be read.
    """
    for path in files:
        yield from _parquet(path) if path.suffix == ".parquet" else _jsonl(path)


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Only \n ends a line: JSON may hold the other characters that Python takes for ends of lines.
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is no JSON ({error}); repair or remove the line.") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number} is {row!r:.40}, expected a JSON object.")
            yield f"{path}:{number}", row


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{path} needs pyarrow: pip install pyarrow, or convert the file to JSONL.") from error
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", _without_nulls(row)
    except ArrowException as error:
        raise ValueError(f"{path} is no whole Parquet file ({error}); fetch it again.") from error


def _without_nulls(value: Any) -> Any:
    """Parquet gives every object every field that any has; what a row did not have is null."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
