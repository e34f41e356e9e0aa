"""Draws boards with the Grafana Foundation SDK (extra `dev`): the only module that needs it.

The JSON is Grafana's classic dashboard model; queries name the data source by the variable
`datasource`, so that a file can be imported into any Grafana.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from specstack_serving.dashboards.panels import Board, Panel, Query

DATA_SOURCE = common.DataSourceRef("prometheus", "${datasource}")
HEIGHT, STAT_HEIGHT = 8, 5
IN_ALL_SERVERS = "specstack_rounds_total"


def as_json(board: Board) -> str:
    """Return a dashboard as Grafana imports it; the same board gives the same text."""
    builder = (
        boards.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["specstack"])
        .readonly()
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(_links())
    )
    for variable in _variables():
        builder = builder.with_variable(variable)
    numbers = count(1)  # names of panels in links
    for row in board.rows:
        builder = builder.with_row(boards.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            builder = builder.with_panel(_panel(panel).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=2).encode(builder.build()) + "\n"


def _links() -> boards.DashboardLink:
    return (
        boards.DashboardLink("specstack")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags(["specstack"])
        .keep_time(True)
        .include_vars(True)
    )


def _variables() -> tuple[Any, ...]:
    source = boards.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return (source, _choice("model_name", "Model", ""), _choice("instance", "Instance", _MODEL))


_MODEL = '{model_name=~"$model_name"}'


def _choice(label: str, title: str, selector: str) -> boards.QueryVariable:
    query = f"label_values({IN_ALL_SERVERS}{selector}, {label})"
    return (
        boards.QueryVariable(label)
        .label(title)
        .datasource(DATA_SOURCE)
        .query({"query": query, "refId": label})
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard.VariableOption(text="All", value="$__all", selected=True))
    )


def _panel(panel: Panel) -> Any:
    form: dict[str, Callable[[Panel], Any]] = {
        "timeseries": _lines,
        "stat": _number,
        "heatmap": _heatmap,
        "table": _table,
    }
    builder = (
        form[panel.form](panel)
        .title(panel.title)
        .description(panel.description)
        .datasource(DATA_SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(STAT_HEIGHT if panel.form == "stat" else HEIGHT)
        .no_value("no data")
    )
    if panel.at_least is not None:
        builder = builder.min(panel.at_least)
    if panel.at_most is not None:
        builder = builder.max(panel.at_most)
    if panel.thresholds:
        steps = [dashboard.Threshold(value, colour) for value, colour in panel.thresholds]
        mode = dashboard.ThresholdsMode.ABSOLUTE
        builder = builder.thresholds(boards.ThresholdsConfig().mode(mode).steps(steps))
    if panel.words:
        texts = {value: dashboard.ValueMappingResult(text=text) for value, text in panel.words}
        builder = builder.mappings([dashboard.ValueMap(options=texts)])
    for letter, query in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", panel.queries, strict=False):
        builder = builder.with_target(_target(letter, query, at_once=panel.form == "table"))
    return builder


def _target(letter: str, query: Query, at_once: bool) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(letter).datasource(DATA_SOURCE).expr(query.expr)
    if at_once:
        return target.instant().format(PromQueryFormat.TABLE)
    return target.range().legend_format(query.legend)


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        shared.VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.BOTTOM)
        .calcs(["mean", "lastNotNull"])
    )
    builder = (
        timeseries.Panel()
        .legend(legend)
        .tooltip(shared.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        .line_width(1)
        .fill_opacity(40 if panel.stacked else 0)
        .show_points(common.VisibilityMode.NEVER)
    )
    if panel.stacked:
        builder = builder.stacking(shared.StackingConfig().mode(common.StackingMode.NORMAL))
    if panel.thresholds:
        style = common.GraphThresholdsStyleMode.DASHED
        builder = builder.thresholds_style(shared.GraphThresholdsStyleConfig().mode(style))
    return builder


def _number(panel: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(shared.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(
            common.BigValueColorMode.VALUE if panel.thresholds else common.BigValueColorMode.NONE
        )
    )


def _heatmap(panel: Panel) -> heatmap.Panel:
    colour = (
        heatmap.HeatmapColorOptions()
        .mode(heatmap_model.HeatmapColorMode.SCHEME)
        .scheme("Viridis")
        .steps(64)
    )
    if panel.at_least is not None and panel.at_most is not None:
        colour = colour.min(panel.at_least).max(panel.at_most)
    return (
        heatmap.Panel()
        .calculate(False)
        .color(colour)
        .cell_values(heatmap.CellValues().unit(panel.unit))
        .y_axis(heatmap.YAxisConfig().unit("none"))
        .tooltip(heatmap.HeatmapTooltip().mode(common.TooltipDisplayMode.SINGLE))
        .show_legend()
    )


def _table(panel: Panel) -> table.Panel:
    hidden = {"Time": True, "Value": True}
    return table.Panel().with_transformation(
        dashboard.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
    )
