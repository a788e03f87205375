"""The arrows between packages: configs, train and serve import dspark_jax, never the other way or each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "dspark_jax": {"train", "serve", "configs", "tests", "benchmarks"},
    "train": {"serve", "tests", "benchmarks"},
    "serve": {"train", "tests", "benchmarks"},
}


def imported(file: Path) -> set[str]:
    """First names of everything a file imports, at any depth of it; relative imports are named too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0] if not node.level else ".")
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files or package == "serve", f"{package} holds no Python files"
    for file in files:
        assert not imported(file) & (FORBIDDEN[package] | {"."}), file


def test_command_starts_without_the_packages_of_training_and_serving():
    heavy = {"grain", "optax", "orbax", "matplotlib", "torch", "transformers", "starlette", "huggingface_hub"}
    # Flax itself brings optax.
    code = f"""
import sys
import flax.nnx
theirs = set(sys.modules)
import dspark_jax.cli
print(sorted({heavy!r} & (set(sys.modules) - theirs)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
