"""The interactive plots of a report, as Bokeh figures made of the summary alone.

Every drawing of a side carries the tag `side:NAME`, so that the page can hide it; the page also
paints axes, grids and rules in its own colours, for light and dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bokeh.models.annotations import BoxAnnotation, Span
from bokeh.models.formatters import NumeralTickFormatter
from bokeh.models.ranges import Range1d
from bokeh.models.sources import ColumnDataSource
from bokeh.models.tickers import BasicTicker, FixedTicker

from specstack_loadtest.looks import BASELINE_COLOR, MEASURES, Summary, colors_of
from specstack_loadtest.plot_parts import (
    Figure,
    add_hover,
    estimate_columns,
    hundredfold,
    intervals,
    new_figure,
    points_with_intervals,
)
from specstack_loadtest.words import load_unit

_LEAST_MS = 0.1
"""Where logarithmic axes begin: two chunks of one read have no gap."""


def all_plots(summary: Summary) -> dict[str, Figure]:
    """By the id of their place in the page; those without anything to draw are left out."""
    found: dict[str, Figure | None] = {
        "crossover": crossover(summary),
        "throughput": throughput(summary),
        "over-time": over_time(summary),
    }
    for phase in summary["phases"]:
        for measure, name in MEASURES.items():
            found[f"{measure}-{phase['number']}"] = ecdf(summary, phase, measure, name)
        found[f"acceptance-{phase['number']}"] = acceptance(summary, phase)
    return {name: plot for name, plot in found.items() if plot is not None}


def crossover(summary: Summary) -> Figure | None:
    """Speedup over the baseline by load; None: there is one load only, or no baseline."""
    phases = summary["phases"]
    levels = [phase["users"] or phase["rate"] for phase in phases]
    if len(phases) < 2 or not summary["comparisons"] or None in levels:
        return None
    is_closed, unit = phases[0]["users"] is not None, load_unit(phases)
    what = "tokens/s" if is_closed else "the mean time to the same answers"
    plot = new_figure(
        f"Speed over {summary['baseline']}'s, by {what}",
        f"load: {unit}",
        f"{summary['baseline']} = 1",
        height=340,
        x_axis_type="log",
        x_range=Range1d(start=min(levels) / 1.25, end=max(levels) * 1.25),
        y_range=_around_one([c["speedup"] for c in summary["comparisons"]]),
    )
    plot.xaxis.ticker = FixedTicker(ticks=sorted(levels))
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]")
    for side, color in colors_of(summary).items():
        own = [c for c in summary["comparisons"] if c["side"] == side]
        points = [(levels[c["phase"]], c["speedup"], c["verdict"]) for c in own]
        points = [point for point in sorted(points, key=lambda p: p[0]) if point[1]["value"]]
        if points:
            columns = estimate_columns([estimate for _, estimate, _ in points])
            source = ColumnDataSource(
                {"x": [x for x, _, _ in points], **columns, "verdict": [v for *_, v in points]}
            )
            points_with_intervals(plot, source, side, color, line=True)
    plot.add_layout(Span(location=1, dimension="width", line_dash="dashed", tags=["rule"]))
    add_hover(
        plot,
        [("load", f"@x {unit}"), ("times the baseline", "@y{0.000}"),
         ("95 %", "@low{0.000} to @high{0.000}"), ("verdict", "@verdict")],
    )  # fmt: skip
    return plot


def _around_one(ratios: Sequence[Mapping[str, float | None]]) -> Range1d:
    """All of them with their intervals, and 1, which they are to be seen against."""
    ends = [1.0, *(x for ratio in ratios for x in ratio.values() if x is not None)]
    spare = max(0.06 * (max(ends) - min(ends)), 0.02)
    return Range1d(start=min(ends) - spare, end=max(ends) + spare)


def throughput(summary: Summary) -> Figure | None:
    """Output tokens per second by load and side."""
    if not summary["results"]:
        return None
    plot = new_figure("Throughput", "", "output tokens/s", height=320)
    sides = colors_of(summary)
    width = 0.8 / len(sides)
    for number, (side, color) in enumerate(sides.items()):
        own = [r for r in summary["results"] if r["side"] == side]
        if not own:
            continue
        at = (number - (len(sides) - 1) / 2) * width
        source = ColumnDataSource(
            {
                "x": [r["phase"] + at for r in own],
                "load": [summary["phases"][r["phase"]]["name"] for r in own],
                **estimate_columns([r["tokens_per_s"] for r in own]),
            }
        )
        bars = plot.vbar(
            "x", width * 0.86, "y", source=source, color=color, fill_alpha=0.75, name=side
        )
        bars.tags = [f"side:{side}"]
        intervals(plot, source, side, color)
    names = {phase["number"]: phase["name"] for phase in summary["phases"]}
    plot.xaxis.ticker = FixedTicker(ticks=list(names))
    plot.xaxis.major_label_overrides = {float(at): name for at, name in names.items()}
    spare = max(0.0, (3 - len(names)) / 2)  # few bars need not be broad ones
    plot.x_range = Range1d(start=-0.6 - spare, end=len(names) - 0.4 + spare)
    ends = [r["tokens_per_s"]["high"] or r["tokens_per_s"]["value"] for r in summary["results"]]
    plot.y_range = Range1d(start=0, end=1.06 * max([*ends, 1e-3]))
    plot.xgrid.visible = False
    add_hover(
        plot,
        [("load", "@load"), ("tokens/s", "@y{0.0}"), ("95 %", "@low{0.0} to @high{0.0}")],
    )
    return plot


def ecdf(summary: Summary, phase: Mapping[str, Any], measure: str, name: str) -> Figure | None:
    """The share of values up to each value, one line per side."""
    curves = [
        (r["side"], r["curves"][measure], r[measure]["count"])
        for r in summary["results"]
        if r["phase"] == phase["number"] and r["curves"][measure]
    ]
    if not curves:
        return None
    lowest = max(_LEAST_MS, min(curve[0] for _, curve, _ in curves))
    highest = max(lowest, *(curve[-1] for _, curve, _ in curves))
    is_wide = highest > 30 * lowest
    plot = new_figure(
        phase["name"],
        f"{name}, ms",
        "share up to it, %",
        height=230,
        x_axis_type="log" if is_wide else "linear",
        x_range=Range1d(start=lowest / 1.15, end=highest * 1.15),
        y_range=Range1d(start=0, end=101),
    )
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[0]")
    plot.xaxis.ticker = (
        FixedTicker(ticks=[m * 10.0**e for e in range(-1, 8) for m in (1, 3)])
        if is_wide
        else BasicTicker(desired_num_ticks=4, num_minor_ticks=0)
    )
    colors = colors_of(summary)
    for side, curve, count in curves:
        shares = [100 * (i + 1) / len(curve) for i in range(len(curve))]
        source = ColumnDataSource(
            {
                "x": [max(_LEAST_MS, value) for value in (curve[0], *curve)],
                "y": [0.0, *shares],
                "count": [count] * (len(curve) + 1),
            }
        )
        line = plot.step(
            "x", "y", source=source, mode="after", color=colors[side], line_width=2, name=side
        )
        line.tags = [f"side:{side}"]
    add_hover(plot, [("up to", "@x{0,0.0} ms"), ("share", "@y{0.0} %"), ("of", "@count")])
    return plot


def over_time(summary: Summary) -> Figure | None:
    """Tokens per second, requests, budget and KV use of every run, one above the other."""
    from bokeh.layouts import column

    if not summary["timelines"]:
        return None
    end_s = max(len(t["tokens_per_s"]) * t["bin_s"] for t in summary["timelines"])
    shared = Range1d(start=0, end=end_s)
    rows: list[tuple[str, str, tuple[str, ...]]] = [
        ("Output tokens", "tokens/s", ("tokens_per_s",)),
        ("In flight, as the client sees it", "requests", ("in_flight",)),
        ("Running (solid), waiting (dashed)", "requests",
         ("running", "queued")),
        ("Drafts allowed", "draft budget", ("draft_budget",)),
        ("KV cache", "share in use", ("kv_usage",)),
    ]  # fmt: skip
    plots = []
    for title, unit, names in rows:
        if any(t[name] is not None for t in summary["timelines"] for name in names):
            plot = new_figure(title, "", unit, height=190, x_range=shared)
            _lines_over_time(plot, summary, names)
            for box in _warmups(summary["phases"]):
                plot.add_layout(box)
            plots.append(plot)
    plots[-1].xaxis.axis_label = "seconds (grey: warm-up)"
    plots[-1].height = 210
    return column(*plots, sizing_mode="stretch_width")


def acceptance(summary: Summary, phase: Mapping[str, Any]) -> Figure | None:
    """Right drafts per drafting round, by depth."""
    found = [
        (r["side"], r["acceptance"]["counters"]["positions"])
        for r in summary["results"]
        if r["phase"] == phase["number"]
        and (r["acceptance"] or {}).get("counters")
        and r["acceptance"]["counters"]["positions"]
    ]
    if not found:
        return None
    plot = new_figure(
        phase["name"], "depth of the draft", "right, % of drafting rounds", height=230,
        y_range=Range1d(start=0, end=100),
    )  # fmt: skip
    deepest = max(position["depth"] for _, positions in found for position in positions)
    plot.xaxis.ticker = FixedTicker(ticks=list(range(1, deepest + 1)))
    plot.x_range = Range1d(start=0.6, end=deepest + 0.4)
    colors = colors_of(summary)
    for side, positions in found:
        source = ColumnDataSource(
            {
                "x": [p["depth"] for p in positions],
                "y": [hundredfold(p["right"]) for p in positions],
                "verified": [hundredfold(p["verified"]) for p in positions],
                "alpha": [hundredfold(p["alpha"]) for p in positions],
            }
        )
        line = plot.line("x", "y", source=source, color=colors[side], line_width=2, name=side)
        dots = plot.scatter("x", "y", source=source, color=colors[side], size=7, name=side)
        line.tags = dots.tags = [f"side:{side}"]
    add_hover(
        plot,
        [("depth", "@x"), ("right", "@y{0.0} %"), ("verified", "@verified{0.0} %"),
         ("of those right before", "@alpha{0.0} %")],
    )  # fmt: skip
    return plot


def _lines_over_time(plot: Figure, summary: Summary, names: Sequence[str]) -> None:
    colors = colors_of(summary)
    for line in summary["timelines"]:
        for name in names:
            if line[name] is None:
                continue
            source = ColumnDataSource(
                {
                    "x": [(i + 0.5) * line["bin_s"] for i in range(len(line[name]))],
                    "y": [float("nan") if value is None else value for value in line[name]],
                    "repeat": [line["repeat"] + 1] * len(line[name]),
                }
            )
            drawn = plot.line(
                "x", "y", source=source, color=colors[line["side"]], line_width=1.6,
                line_alpha=0.95 if line["repeat"] == 0 else 0.5,
                line_dash="dashed" if name == "queued" else "solid", name=line["side"],
            )  # fmt: skip
            drawn.tags = [f"side:{line['side']}"]
    plot.y_range.start = 0
    add_hover(plot, [("at", "@x{0.0} s"), ("value", "@y{0.00}"), ("repeat", "@repeat")])


def _warmups(phases: Sequence[Mapping[str, Any]]) -> Iterator[BoxAnnotation]:
    for phase in phases:
        if phase["seconds"] is not None and phase["warmup_s"]:
            yield BoxAnnotation(
                left=phase["starts_s"],
                right=phase["starts_s"] + phase["warmup_s"],
                fill_color=BASELINE_COLOR,
                fill_alpha=0.16,
                line_color=None,
            )
