"""report.html: one file that needs nothing else, made of summary.json and manifest.json alone.

It carries the summary as JSON, so that its numbers can be checked; the same summary gives the same
page. Bokeh is loaded when it is needed: it is large.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specstack_loadtest import headlines, words
from specstack_loadtest.folder import Manifest
from specstack_loadtest.looks import colors_of
from specstack_loadtest.page_context import context_of
from specstack_loadtest.summary import SUMMARY

REPORT = "report.html"
TEMPLATES = Path(__file__).parent / "templates"


def write_report(folder: Path) -> Path:
    """Write report.html from the summary that lies in the folder; returns its path.

    Raises:
        FolderError: there is no manifest.
        OSError, ValueError: there is no summary.
    """
    summary = json.loads((folder / SUMMARY).read_text("utf-8"))
    target = folder / REPORT
    target.write_text(page(summary, Manifest.read(folder)), "utf-8")
    return target


def page(summary: Mapping[str, Any], manifest: Manifest) -> str:
    """The contents of report.html."""
    plots = plot_items(summary)
    template = _environment().get_template("report.html.j2")
    return template.render(
        summary=summary,
        manifest=manifest,
        colors=colors_of(summary),
        conclusions=headlines.conclusions(summary),
        verdicts=headlines.verdicts(summary),
        fatal=[p["text"] for p in summary["problems"] if p["fatal"] or p["kind"] == "baseline"],
        notes=[
            p["text"] for p in summary["problems"] if not p["fatal"] and p["kind"] != "baseline"
        ],
        plots=plots,
        summary_json=embedded(summary),
        plots_json=embedded(plots),
        bokeh_version=version("bokeh"),
        bokeh_js=Markup(_bokeh_js()),
        style=Markup((TEMPLATES / "style.css").read_text("utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text("utf-8")),
        **context_of(summary, manifest),
    )


def embedded(data: Any) -> Markup:
    """JSON for a script element, which no text in it can end."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def plot_items(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What BokehJS draws, by the id of its place. Equal summaries give equal items."""
    from bokeh.core.types import ID
    from bokeh.embed import json_item

    from specstack_loadtest.plots import all_plots

    return {
        name: _renumbered(json_item(plot, ID(name))) for name, plot in all_plots(summary).items()
    }


def _renumbered(item: Any) -> Any:
    """Bokeh counts its models through a whole process; here they are counted per plot."""
    numbers: dict[str, str] = {}

    def walked(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: numbers.setdefault(one, f"m{len(numbers)}")
                if key in ("id", "root_id") and isinstance(one, str)
                else walked(one)
                for key, one in value.items()
            }
        return [walked(one) for one in value] if isinstance(value, list | tuple) else value

    return walked(item)


def _bokeh_js() -> str:
    from bokeh.resources import Resources

    script, *_ = Resources(mode="inline", components=["bokeh"]).js_raw
    return str(script)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "amount": words.amount,
        "ms": words.milliseconds,
        "signed_ms": words.signed_ms,
        "percent": words.percent,
    }
    environment.globals["interval"] = words.interval
    return environment
