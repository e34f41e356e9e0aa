"""The plots of a report, one PNG each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specstack.evaluation.measures import Estimate
from specstack.evaluation.report import Report
from specstack.evaluation.tables import LENGTH, bucket_name


def plot(report: Report, folder: Path) -> list[Path]:
    """Write all plots into a folder that is there."""
    plots: dict[str, Callable[[Report, Path], None]] = {
        "accept_length": _accept_length,
        "alpha": _alpha,
        "context": _context,
        "calibration": _calibration,
    }
    written = []
    for name, draw in plots.items():
        written.append(folder / f"{name}.png")
        draw(report, written[-1])
    return written


@contextmanager
def _axes(path: Path, x: str, y: str) -> Iterator[Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel=x, ylabel=y)
    yield axes
    if axes.has_data():
        axes.legend()
    figure.savefig(path, dpi=120)


def _accept_length(report: Report, path: Path) -> None:
    with _axes(path, "draft budget", LENGTH) as axes:
        for kind in dict.fromkeys(f.configuration.plan.tree.kind for f in report.configurations):
            found = [f for f in report.configurations if f.configuration.plan.tree.kind == kind]
            found.sort(key=lambda f: f.configuration.budget.draft_budget)
            budgets = [f.configuration.budget.draft_budget for f in found]
            _line(axes, budgets, [f.overall.accept_length for f in found], kind)


def _alpha(report: Report, path: Path) -> None:
    with _axes(path, "depth k", f"alpha_k ({report.chain.configuration.name})") as axes:
        for name, measures in report.chain.per_data_set.items():
            _line(axes, list(range(1, len(measures.alphas) + 1)), list(measures.alphas), name)


def _context(report: Report, path: Path) -> None:
    with _axes(path, "tokens before the root", LENGTH) as axes:
        for found in report.configurations:
            names = [bucket_name(bucket) for bucket in found.per_context]
            lengths = [measures.accept_length for measures in found.per_context.values()]
            _line(axes, names, lengths, found.configuration.name)


def _calibration(report: Report, path: Path) -> None:
    with _axes(path, "probability of a draft's path, by the drafter", "share right") as axes:
        axes.plot([0, 1], [0, 1], color="grey", linewidth=1, label="calibrated")
        for found in report.configurations:
            qs = [b.mean_q for b in found.bins]
            _line(axes, qs, [b.right for b in found.bins], found.configuration.name)


def _line(axes: Any, x: list[Any], estimates: list[Estimate], label: str) -> None:
    shown = [(place, e) for place, e in zip(x, estimates, strict=True) if e.value is not None]
    if not shown:
        return
    places = [place for place, _ in shown]
    values = [e.value or 0.0 for _, e in shown]
    below = [v - (v if e.low is None else e.low) for v, (_, e) in zip(values, shown, strict=True)]
    above = [(v if e.high is None else e.high) - v for v, (_, e) in zip(values, shown, strict=True)]
    spread = [[max(0.0, d) for d in below], [max(0.0, d) for d in above]]
    axes.errorbar(places, values, yerr=spread, marker="o", capsize=3, label=label)
