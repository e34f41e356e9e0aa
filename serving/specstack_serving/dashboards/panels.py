"""What a dashboard is made of, as data: nothing here knows Grafana."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Query:
    """One PromQL expression and what its series are called in the legend."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    description: str
    """How to read it."""
    unit: str
    """A Grafana unit; `suffix:` units are free text behind the number."""
    queries: tuple[Query, ...]
    form: Literal["timeseries", "stat", "heatmap", "table"] = "timeseries"
    width: int = 8
    """Of 24."""
    stacked: bool = False
    at_least: float | None = None
    at_most: float | None = None
    thresholds: tuple[tuple[float | None, str], ...] = ()
    """(from this value on, colour); the first has None."""
    words: tuple[tuple[str, str], ...] = ()
    """(value, text shown instead of it)."""


@dataclass(frozen=True)
class Row:
    """Panels that answer one question."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
