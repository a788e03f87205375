"""The notebooks run top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

PRINTED = {
    "02_train_a_drafter": ("step 20 of 20, the very same state: True",),
    "03_calibrate_and_schedule": (
        "2.3200  <- EarlyStop",
        "3.3575  <- EarlyStop",
        "Oracle: P(A) = 0.85",
        "EarlyStop: P(A) = 0.70",
        "LaggedCapacity: P(A) = 0.70",
        "Generator refuses: Oracle",
    ),
}
"""What a notebook prints whatever it measures, besides that drafting changes no text."""


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("DSPARK_NOTEBOOK_TOKENS", "24")
    if path.stem == "02_train_a_drafter":  # a tiny model, whose programs take longer to compile than to run
        monkeypatch.setenv("DSPARK_NOTEBOOK_SIZE", "tiny")
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}}).execute()
    text = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    for line in ("identical: True", *PRINTED.get(path.stem, ())):
        assert line in text
    assert "identical: False" not in text
