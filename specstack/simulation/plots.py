"""The plots of a simulation, one PNG each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specstack.simulation.job import Report


def plot(report: Report, folder: Path) -> list[Path]:
    """Write all plots into a folder that is there."""
    names = list(report.runs)
    measures = {name: report.measures(name) for name in names}
    paths = [folder / f"{name}.png" for name in ("budgets", "tokens_per_s", "regret")]
    _budgets(report, paths[0])
    for key, label, path in (
        ("tokens_per_s", "tokens/s", paths[1]),
        ("regret", "share of time that the oracle saves", paths[2]),
    ):
        with _figure(path, height=4) as figure:
            axes = figure.add_subplot(ylabel=label, title=report.settings["load"])
            axes.bar(names, [measures[name][key] for name in names])
            axes.tick_params(axis="x", rotation=30)
    return paths


def _budgets(report: Report, path: Path) -> None:
    """Budget and load over time, a panel per policy."""
    with _figure(path, height=1.8 * len(report.runs) + 0.5) as figure:
        panels = figure.subplots(len(report.runs), sharex=True, squeeze=False)[:, 0]
        for axes, (name, run) in zip(panels, report.runs.items(), strict=True):
            at_s = run.at_ms / 1e3
            axes.step(at_s, run.draft_budgets, where="post")
            axes.set_ylabel(name)
            axes.set_ylim(0, 1.05 * max(report.settings["choices"]))
            load = axes.twinx()
            load.step(at_s, run.num_running, where="post", color="grey", linewidth=0.8)
            load.set_ylim(0, 1.3 * max(int(run.num_running.max(initial=1)), 1))
            load.set_ylabel("requests", color="grey")
        panels[-1].set_xlabel("seconds")
        panels[0].set_title("draft budget (left), requests in the batch (right, grey)")


@contextmanager
def _figure(path: Path, height: float) -> Iterator[Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.savefig(path, dpi=120)
