"""Tokens on disk: made once, gone on with after a kill, refused where they are of other data or another template."""

import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from dspark_jax.whole_file import whole_file
from train.data.files import find_files, read_rows
from train.data.rows import Counts, Encoded, RowReader
from train.data.store import FILES, TokenStore, add_crc

CHUNK = 256
"""Rows read at a time, by as many threads as `tokenizers` takes; every 16th time is a point to go on from."""


@dataclass
class Note:
    """What a directory holds; written last, so whatever stands behind it in the files is not there yet.

    Attributes:
      of: tokenizer, template and options; files: name, size and checksum of the data files.
      lengths: entries of each file here; crc, largest: checksum of the documents, and their largest token id.
      done: all rows of the data files are in.
    """

    of: dict[str, Any]
    files: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=lambda: asdict(Counts()))
    lengths: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FILES, 0))
    crc: int = 0
    largest: int = -1
    done: bool = False


def cached_documents(
    directory: str | Path, paths: Sequence[str | Path], reader: RowReader
) -> tuple[TokenStore, Counts]:
    """The documents of data files, tokenised into `directory` as far as they are not there yet.

    Rows appended to the last file, and files added behind it, are tokenised alone. A process that finds another one at
    work waits for it.

    Raises:
      FileNotFoundError: no such data file.
      ValueError: a row of another form, no document at all, or a directory that holds tokens of something else.
    """
    directory, files = Path(directory), find_files(paths)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / "lock"):
        note = _read_note(directory, _identity(reader))
        here = [_known(path, None) for path in files]
        _check_files(directory, note, files, here)
        if not (note.done and note.files == here):
            note.files, note.done = here, False
            _fill(directory, note, files, reader)
    counts = Counts(**{**note.counts, "skipped": {k: tuple(v) for k, v in note.counts["skipped"].items()}})
    if not counts.documents:
        why = str(counts).replace("\n", "; ")
        raise ValueError(f"no documents in {[str(f) for f in files]}; expected at least one usable row. {why}")
    if note.largest >= reader.vocab_size:
        raise ValueError(
            f"{directory} holds the token id {note.largest}, the target has 0..{reader.vocab_size - 1}; delete it, and "
            "give the data of this target."
        )
    return TokenStore.open(directory, note.crc), counts


def _fill(directory: Path, note: Note, files: Sequence[Path], reader: RowReader) -> None:
    """Adds the rows that are not in yet."""
    counts = Counts(**note.counts)
    rows = islice(read_rows(files), counts.rows, None)
    chunks = iter(lambda: list(islice(rows, CHUNK)), [])
    columns = TextColumn("tokenising: {task.fields[rows]} rows, {task.fields[tokens]} tokens"), TimeElapsedColumn()
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        task = progress.add_task("", total=None, rows=counts.rows, tokens=counts.tokens)
        out = {name: stack.enter_context(_path(directory, name).open("ab")) for name in FILES}
        for name, file in out.items():
            file.truncate(note.lengths[name] * np.dtype(FILES[name]).itemsize)
        for number, chunk in enumerate(chunks, 1):
            documents, skipped = reader.read(chunk)
            _append(out, note, documents)
            counts.rows += len(chunk)
            counts.documents += len(documents)
            counts.tokens = note.lengths["tokens"]
            counts.supervised += sum(_supervised(*document) for document in documents)
            for place, reason in skipped:
                counts.skip(place, reason)
            progress.update(task, rows=counts.rows, tokens=counts.tokens)
            if number % 16 == 0:
                _commit(directory, note, counts, out)
        note.done = True
        _commit(directory, note, counts, out)


def _append(out: dict[str, Any], note: Note, documents: Sequence[Encoded]) -> None:
    for ids, flips in documents:
        note.crc = add_crc(note.crc, ids, flips)
        note.largest = max(note.largest, int(ids.max()))
        for name, values in ("tokens", ids), ("flips", flips):
            note.lengths[name] += len(values)
            out[name].write(values.astype(FILES[name]).tobytes())
        for name, end in ("ends", note.lengths["tokens"]), ("flip_ends", note.lengths["flips"]):
            note.lengths[name] += 1
            out[name].write(np.array([end], FILES[name]).tobytes())


def _supervised(ids: np.ndarray, flips: np.ndarray) -> int:
    places = [*flips.tolist(), len(ids)] if len(flips) % 2 else flips.tolist()
    return sum(places[1::2]) - sum(places[::2])


def _commit(directory: Path, note: Note, counts: Counts, out: dict[str, Any]) -> None:
    for file in out.values():
        file.flush()
        os.fsync(file.fileno())
    note.counts = asdict(counts)
    with whole_file(directory / "note.json") as work:
        work.write_text(json.dumps(asdict(note), indent=1) + "\n")


def _read_note(directory: Path, of: dict[str, Any]) -> Note:
    path = directory / "note.json"
    if not path.is_file():
        return Note(of)
    try:
        note = Note(**json.loads(path.read_text()))
        short = [n for n, dtype in FILES.items() if _size(directory, n) < note.lengths[n] * np.dtype(dtype).itemsize]
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"{path} is no note of tokens ({error}); delete {directory} to tokenise anew.") from error
    if short:
        raise ValueError(f"{directory} holds {short} cut short; delete it to tokenise anew.")
    if changed := {k: (note.of.get(k), here) for k, here in of.items() if note.of.get(k) != here}:
        raise ValueError(
            f"{directory} holds tokens made otherwise (field: (there, here)): {changed}. Delete it to tokenise anew, "
            "or keep these tokens elsewhere."
        )
    return note


def _check_files(directory: Path, note: Note, files: Sequence[Path], here: Sequence[dict[str, Any]]) -> None:
    """The files noted must stand first, unchanged; only the last may have grown, if it is one that can be added to."""
    for i, there in enumerate(note.files):
        given = i < len(files)
        if given and here[i] == there:
            continue
        grows = i + 1 == len(note.files) and there["name"].endswith(".jsonl")
        if not (given and grows and _known(files[i], there["size"]) == there):
            raise ValueError(
                f"{directory} holds tokens of {there['name']!r}, which is not there as it was: "
                f"{f'{files[i]} is another' if given else 'no such file is given'}. Delete it to tokenise anew, or "
                "keep these tokens elsewhere."
            )


def _known(path: Path, size: int | None) -> dict[str, Any]:
    """Name, size and checksum of a file, or of its first `size` bytes."""
    left = path.stat().st_size if size is None else size
    crc, seen = 0, 0
    with path.open("rb") as file:
        while block := file.read(min(left - seen, 1 << 22)):
            crc, seen = zlib.crc32(block, crc), seen + len(block)
    return {"name": path.name, "size": seen, "crc": crc}


def _identity(reader: RowReader) -> dict[str, Any]:
    chat = {f"chat.{name}": value for name, value in asdict(reader.chat).items()}
    if reader.tokenizer is None:
        return {"tokenizer": None, "template": None, **chat}
    tokenizer = reader.tokenizer
    vocabulary = zlib.crc32(tokenizer.tokenizer.to_str().encode())
    template = zlib.crc32(repr((tokenizer.template, tokenizer.bos_token, tokenizer.eos_token)).encode())
    return {"tokenizer": vocabulary, "template": template, **chat}


def _path(directory: Path, name: str) -> Path:
    return directory / f"{name}.{FILES[name]}"


def _size(directory: Path, name: str) -> int:
    return _path(directory, name).stat().st_size


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
