"""The folder of a report."""

from __future__ import annotations

import json
from pathlib import Path

from specstack.evaluation.plots import plot
from specstack.evaluation.report import Report
from specstack.evaluation.tables import markdown


def write(report: Report, folder: Path) -> None:
    """Write report.json, plots and report.md; the folder is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(report.as_data(), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(data + "\n", "utf-8")
    plot(report, folder)
    (folder / "report.md").write_text(markdown(report), "utf-8")
