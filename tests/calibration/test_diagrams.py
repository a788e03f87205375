"""Reliability diagrams are drawn, and missing plotting is told."""

import sys

import numpy as np
import pytest

from dspark_jax.calibration import Calibration, join, plot_reliability


def test_a_picture_is_written_for_every_domain_and_position(rounds, tmp_path):
    records = join([rounds(500, seed=1, domain="a"), rounds(500, seed=2, domain="b", lengths=np.full(500, 3))])
    path = tmp_path / "new" / "r.png"
    plot_reliability(path, records, Calibration((1.8, 1.3, 2.2, 0.7)))
    assert path.read_bytes()[:4] == b"\x89PNG" and [p.name for p in path.parent.iterdir()] == ["r.png"]


def test_missing_matplotlib_is_told(rounds, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        plot_reliability(tmp_path / "r.png", rounds(50), Calibration((1.0,) * 4))
