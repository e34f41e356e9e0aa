"""Curves of a run: CSV files that grow by a row, and their plots.

A resumed run drops the rows after its checkpoint first, so that a step stands in a file once.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path


class Curve:
    """A CSV file whose first column is `step`."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Keep the rows up to `last_step`."""
        self.path = path
        rows = [row for row in read_curve(path) if float(row["step"]) <= last_step]
        self._columns = list(rows[0]) if rows else []
        work = path.with_name(f".{path.name}.new")
        with work.open("w", newline="", encoding="utf-8") as file:
            if rows:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(rows)
        work.replace(path)

    def add(self, row: Mapping[str, float]) -> None:
        """Append a row; the first one names the columns."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            if not self._columns:
                self._columns = list(row)
                csv.DictWriter(file, self._columns).writeheader()
            csv.DictWriter(file, self._columns).writerow(
                {name: f"{value:.6g}" if value % 1 else int(value) for name, value in row.items()}
            )


def read_curve(path: Path) -> list[dict[str, str]]:
    """The rows of a file; none if it is missing."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def plot_curves(log: Path, holdout: Path, folder: Path) -> list[Path]:
    """Draw loss, alpha_k and accept length over answer tokens; one PNG each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(exist_ok=True)
    looked = read_curve(holdout)
    alphas = [name for name in (looked[0] if looked else ()) if name.startswith("alpha_")]
    plots = [
        ("loss", read_curve(log), ["loss"], "loss"),
        ("alpha", looked, alphas, "alpha_k on the holdout"),
        ("accept_length", looked, ["accept_length"], "accept length (bonus included)"),
    ]
    written = []
    for name, rows, columns, label in plots:
        if not rows:
            continue
        figure = Figure(figsize=(6, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel="answer tokens", ylabel=label)
        for column in columns:
            tokens = [float(row["answer_tokens"]) for row in rows]
            axes.plot(tokens, [float(row[column]) for row in rows], label=column)
        axes.legend()
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=120)
    return written
