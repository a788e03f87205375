"""Named tensors on disk, read one at a time."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from dspark_jax.checkpoints.json_file import read_json


class TensorSource(Protocol):
    """A set of named tensors that can be read lazily."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray: ...

    def file(self, name: str) -> str: ...


class SafetensorsSource:
    """All tensors of a Hugging Face directory: `model.safetensors`, or the shards its index names.

    Raises:
      FileNotFoundError: no safetensors file, or a shard that the index names is missing.
      ValueError: a file is truncated or corrupt, a tensor stands in two shards, or the index and the shards disagree.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._handles, self._where = {}, {}
        index_path = self.directory / "model.safetensors.index.json"
        index = read_json(index_path).get("weight_map") if index_path.is_file() else None
        named = isinstance(index, dict) and all(isinstance(shard, str) for shard in index.values())
        if index_path.is_file() and not named:
            raise ValueError(f"{index_path} has no weight_map of tensor names with their shards; fetch it again.")
        for path in self._files(index):
            try:
                handle = safe_open(path, framework="np")
            except SafetensorError as error:
                raise ValueError(
                    f"{path} is not a whole safetensors file ({error}). It was probably cut short while downloading: "
                    "delete it and fetch it again."
                ) from error
            self._handles[path.name] = handle
            for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                if name in self._where:
                    raise ValueError(f"tensor {name!r} stands in both {self._where[name]} and {path.name}.")
                self._where[name] = path.name
        if index is not None and index != self._where:
            wrong = sorted(set(index.items()) ^ set(self._where.items()))
            raise ValueError(f"{index_path} and its shards disagree about {[name for name, _ in wrong][:6]}.")

    def _files(self, index: dict[str, str] | None) -> Iterable[Path]:
        if index is not None:
            paths = [self.directory / name for name in sorted(set(index.values()))]
            if missing := [p.name for p in paths if not p.is_file()]:
                raise FileNotFoundError(f"{self.directory} lacks shards {missing} that its index names.")
            return paths
        single = self.directory / "model.safetensors"
        if not single.is_file():
            raise FileNotFoundError(
                f"{self.directory} holds neither model.safetensors nor model.safetensors.index.json."
            )
        return [single]

    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        return self._handles[self._where[name]].get_tensor(name)

    def first_rows(self, name: str, count: int) -> np.ndarray:
        """The first rows of a tensor, without reading the rest."""
        return self._slice(name)[: min(count, self.shape(name)[0])]

    def file(self, name: str) -> str:
        return str(self.directory / self._where[name])

    def dtype(self, name: str) -> str:
        """The stored dtype in safetensors spelling, such as BF16."""
        return self._slice(name).get_dtype()

    def _slice(self, name: str):
        return self._handles[self._where[name]].get_slice(name)
