"""From a name to a local path: a path as it is, or a hub id fetched once."""

from collections.abc import Sequence
from pathlib import Path

FILES = ("*.json", "*.safetensors", "*.jinja")
"""What is fetched of a repository: never code."""


def resolve(name: str | Path, files: Sequence[str] = FILES) -> Path:
    """The local path of a checkpoint.

    Args:
      name: an existing file or directory, or a hub id `owner/name`, fetched through `huggingface_hub` with its progress
        bars and cache.
      files: patterns of what is fetched.

    Raises:
      FileNotFoundError: no such path, and not the form of a hub id, or the hub cannot be reached or has no such id.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    text = str(name)
    if text.count("/") != 1 or text.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise FileNotFoundError(
            f"{text} does not exist; expected a file, a directory or a hub id such as Qwen/Qwen3-4B."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=list(files)))
    except Exception as error:  # HTTP libraries differ between versions of the hub, and so do their errors.
        raise FileNotFoundError(
            f"{text} is no local path, and the hub did not give it ({type(error).__name__}: {error}). "
            "Check the id and the connection, or pass a directory."
        ) from error
