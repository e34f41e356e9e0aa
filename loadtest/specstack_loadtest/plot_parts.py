"""What every plot of a report is made of: its frame, intervals, and what it says at a point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bokeh.models.annotations import TeeHead, Whisker
from bokeh.models.sources import ColumnDataSource
from bokeh.models.tools import HoverTool
from bokeh.plotting import figure

Figure = Any
"""Bokeh's figure, which has no types."""
_TOOLS = "xpan,xwheel_zoom,box_zoom,reset,save"


def new_figure(title: str, x_label: str, y_label: str, *, height: int, **options: Any) -> Figure:
    """As wide as its place, without a background."""
    plot = figure(
        title=title,
        x_axis_label=x_label,
        y_axis_label=y_label,
        height=height,
        min_width=0,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        active_drag="box_zoom",
        active_scroll=None,
        toolbar_location="above",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **options,
    )
    plot.toolbar.autohide = True
    plot.toolbar.logo = None
    return plot


def points_with_intervals(
    plot: Figure, source: ColumnDataSource, side: str, color: str, *, line: bool
) -> None:
    """Estimates of one side, and a line through them."""
    drawn = [plot.scatter("x", "y", source=source, color=color, size=9, name=side)]
    if line:
        drawn.append(plot.line("x", "y", source=source, color=color, line_width=2, name=side))
    for renderer in drawn:
        renderer.tags = [f"side:{side}"]
    intervals(plot, source, side, color)


def intervals(plot: Figure, source: ColumnDataSource, side: str, color: str) -> None:
    """From `low` to `high` at each `x`; where they are NaN, nothing."""
    whisker = Whisker(
        base="x", lower="low", upper="high", source=source, line_color=color, line_width=1.5,
        lower_head=TeeHead(line_color=color, size=8), upper_head=TeeHead(line_color=color, size=8),
        tags=[f"side:{side}", "interval"],
    )  # fmt: skip
    plot.add_layout(whisker)


def estimate_columns(found: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Columns of values and intervals; NaN is not drawn."""
    columns: dict[str, Callable[[Mapping[str, float | None]], float | None]] = {
        "y": lambda e: e["value"],
        "low": lambda e: e["low"],
        "high": lambda e: e["high"],
    }
    return {
        name: [float("nan") if (value := of(e)) is None else value for e in found]
        for name, of in columns.items()
    }


def add_hover(plot: Figure, rows: Sequence[tuple[str, str]]) -> None:
    """Say at a point: whose it is, and (name, format) of its columns."""
    renderers = [r for r in plot.renderers if r.name]
    plot.add_tools(HoverTool(renderers=renderers, tooltips=[("", "$name"), *rows]))


def hundredfold(share: float | None) -> float:
    """A share in per cent; NaN is not drawn."""
    return float("nan") if share is None else 100 * share
