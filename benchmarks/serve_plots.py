"""Figures 7 and 8 of the DSpark paper, of a measured server."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.load import Summary

Curves = Mapping[str, Mapping[int, Summary]]
"""By mode and users."""


def plot_pareto(path: Path, curves: Curves) -> None:
    """Draws throughput against a user's speed, a line a mode and a point a number of users."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    for mode, points in curves.items():
        x, y = [p.user_speed for p in points.values()], [p.throughput for p in points.values()]
        panel.plot(x, y, marker="o", markersize=4, label=mode)
        for users, point in points.items():
            panel.annotate(f"{users}", (point.user_speed, point.throughput), (3, 3), textcoords="offset points", size=7)
    panel.set(xlabel="tokens/s of a user", ylabel="tokens/s of all users", title="points: users at a time")
    finish(figure, path)


def plot_budget(path: Path, curves: Curves) -> None:
    """Draws throughput, and tokens verified a request and round, against the number of users."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    labels = {"throughput": "tokens/s of all users", "budget": "tokens verified a request and round"}
    for panel, (field, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        for mode, points in curves.items():
            panel.plot(list(points), [getattr(p, field) for p in points.values()], marker="o", markersize=4, label=mode)
        users = sorted({n for points in curves.values() for n in points})
        panel.set_xscale("log", base=2)
        panel.set_xticks(users, [str(n) for n in users])
        panel.set(xlabel="users at a time", ylabel=label, ylim=(0, None))
    finish(figure, path)


def finish(figure, path: Path) -> None:
    """Adds a legend and writes the file."""
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)
