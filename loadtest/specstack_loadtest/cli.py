"""`specstack load`: run scenarios against servers, compare pipelines, report.

Standard output carries the result (tables, JSON, names of files); progress and problems go to
standard error. Exit codes: 1 when something failed or the numbers cannot be trusted, 2 when a
scenario or a pipeline is wrong, 3 when a pipeline cannot run here.
"""

from __future__ import annotations

import json
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict, Unpack

import click

from specstack_loadtest.compare import Comparison
from specstack_loadtest.folder import FolderError, Manifest, digest, freeze
from specstack_loadtest.locust_process import ended_by_signals
from specstack_loadtest.progress import live_display
from specstack_loadtest.report import write_report
from specstack_loadtest.runner import LoadFailed
from specstack_loadtest.scenario import Scenario
from specstack_loadtest.scenario_file import load_scenario, shipped_scenarios
from specstack_loadtest.scrape import server_facts
from specstack_loadtest.server import RemoteRefused, ServerUnusable, check_address, identify
from specstack_loadtest.sides import PLAIN, Side, pipeline_sides, url_side
from specstack_loadtest.summary import write_summary
from specstack_loadtest.table import print_summary
from specstack_loadtest.verify import verify

EXIT_CODES = """
\b
Exit codes:
  0    done, and every request was answered
  1    requests failed, a server ended or was changed, the client was the bottleneck, outputs
       differ, or a report does not follow from its raw data
  2    the scenario, a pipeline, or this command line, is wrong
  3    a pipeline does not fit the model, the device or SGLang
  130  interrupted; what was measured is kept
"""
_out = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Where everything goes. Default: load/SCENARIO-TIME. A folder with a part of the same"
    " runs is gone on with: runs that ended well are kept, the others run again.",
)  # fmt: skip
_workers = click.option(
    "--workers", default=1, show_default=True, type=click.IntRange(1, 256), metavar="NUM",
    help="Processes that send requests.",
)  # fmt: skip
_repeats = click.option(
    "--repeats", default=2, show_default=True, type=click.IntRange(1, 100), metavar="NUM",
    help="Runs of every side, in turns. A folder that is gone on with keeps the repeats that it has"
    " begun, however few are asked for.",
)  # fmt: skip
_format = click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
_remote = click.option(
    "--allow-remote", is_flag=True, help="Send load to a server that is not on this machine."
)


class _Common(TypedDict):
    """Options of every command that sends load."""

    repeats: int
    workers: int
    out: Path | None
    form: str


@click.group()
def load_test() -> None:
    """Load tests for OpenAI-compatible servers.

    \b
    Examples:
      specstack load scenarios
      specstack load run smoke --url http://127.0.0.1:30000
      specstack load compare crossover --pipeline dsl/specs/quickstart.yaml
      specstack load report load/crossover-20261201-101500 --verify
    """


@load_test.command(epilog=EXIT_CODES, short_help="Run a scenario against a server.")
@click.argument("scenario")
@click.option("--url", required=True, help="Of the server, without /v1.")
@click.option("--name", default="server", show_default=True, help="What reports call it.")
@click.option(
    "--baseline", default="auto", show_default=True, metavar="auto|none|URL",
    help="What it is compared with: a server of the same model without speculation. auto: a"
    " specstack server itself, asked not to speculate; other servers have none.",
)  # fmt: skip
@click.option("--model", help="Which one, of a server with several. Default: the only one.")
@_repeats
@_workers
@_out
@_remote
@_format
def run(
    scenario: str,
    url: str,
    name: str,
    baseline: str,
    model: str | None,
    allow_remote: bool,
    **common: Unpack[_Common],
) -> None:
    """Run SCENARIO, a file or the name of a shipped one, against the server at --url.

    \b
    Examples:
      specstack load run smoke --url http://127.0.0.1:30000
      specstack load run my.yaml --url http://127.0.0.1:8000 --baseline http://127.0.0.1:8001
      specstack load run chat-burst --url http://10.0.0.5:8000 --allow-remote --workers 8
    """
    url = url.rstrip("/").removesuffix("/v1")
    asked = load_scenario(scenario)
    if name == PLAIN:
        raise click.ClickException(f"--name {PLAIN}: that is the baseline's")
    try:
        sides = [url_side(name, url, model=model)]
        if baseline not in ("auto", "none"):
            baseline = baseline.rstrip("/").removesuffix("/v1")
            sides.insert(0, url_side(PLAIN, baseline, model=model))
        for side in sides:
            check_address(side.facts["url"], allow_remote)
        identify(url, model)  # which waits for a server that still starts
        if baseline == "auto" and "specstack" in server_facts(url):
            sides.insert(0, url_side(PLAIN, url, model=model, opt_out=True))
    except (RemoteRefused, ServerUnusable) as error:
        raise click.ClickException(str(error)) from None
    _go("run", asked, scenario, tuple(sides), allow_remote=allow_remote, **common)


@load_test.command(epilog=EXIT_CODES, short_help="Compare pipelines under a scenario.")
@click.argument("scenario")
@click.option(
    "--pipeline", "pipelines", multiple=True, required=True, metavar="[NAME=]FILE",
    help="Served and measured. May be repeated.",
)  # fmt: skip
@click.option(
    "--plain/--no-plain", default=True, show_default=True,
    help="Whether plain decoding of the first pipeline's target is measured, too: the baseline.",
)  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Of every pipeline.")
@_repeats
@_workers
@_out
@_format
def compare(
    scenario: str,
    pipelines: tuple[str, ...],
    plain: bool,
    overrides: tuple[str, ...],
    **common: Unpack[_Common],
) -> None:
    """Serve each pipeline in turn on this machine and run SCENARIO on it.

    \b
    Examples:
      specstack load compare crossover --pipeline dsl/specs/quickstart.yaml
      specstack load compare chat-burst --pipeline a.yaml --pipeline tuned=b.yaml --repeats 3
    """
    asked = load_scenario(scenario)
    sides = pipeline_sides(pipelines, overrides, plain)
    _go("compare", asked, scenario, sides, allow_remote=False, **common)


@load_test.command(epilog=EXIT_CODES, short_help="Write a folder's report again, or check it.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--verify", "check", is_flag=True,
    help="Only check that every number follows from the raw data; needs no server.",
)  # fmt: skip
@_format
def report(folder: Path, check: bool, form: str) -> None:
    """Compute numbers and page of FOLDER from its raw data.

    \b
    Examples:
      specstack load report load/crossover-20261201-101500
      specstack load report docs/benchmarks/crossover --verify
    """
    try:
        manifest = Manifest.read(folder)
        if check:
            differences = verify(folder)
            for difference in differences:
                click.echo(f"{folder}: {difference}", err=True)
            if form == "json":
                click.echo(json.dumps({"differences": differences}, indent=2))
            elif not differences:
                click.echo(f"{folder}: every number follows from the raw data")
            if differences:
                sys.exit(1)
            return
        manifest.with_killed_runs(folder).write(folder)
        write_summary(folder)
        page = write_report(folder)
    except (FolderError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"report: {page}", err=True)
    _print(json.loads((folder / "summary.json").read_text("utf-8")), form)


@load_test.command(short_help="List the shipped scenarios.")
@_format
def scenarios(form: str) -> None:
    """List the scenarios that can be run by name, with what they are for.

    \b
    Examples:
      specstack load scenarios
      specstack load scenarios --format json
    """
    listed = {name: load_scenario(name) for name in shipped_scenarios()}
    if form == "json":
        click.echo(json.dumps({n: s.model_dump(mode="json") for n, s in listed.items()}, indent=2))
        return
    width = max(map(len, listed))
    for name, one in listed.items():
        click.echo(f"{name:{width}}  {one.description}")


def _go(
    kind: str,
    scenario: Scenario,
    name_or_file: str,
    sides: tuple[Side, ...],
    *,
    allow_remote: bool,
    **common: Unpack[_Common],
) -> None:
    files = freeze(scenario)
    manifest = Manifest(
        kind=kind,
        scenario={"name": scenario.name, "file": name_or_file, "sha256": digest(files)},
        sides=tuple(side.name for side in sides),
        baseline=PLAIN if any(side.name == PLAIN for side in sides) else None,
        repeats=common["repeats"],
        side_facts={side.name: side.facts for side in sides},
        num_workers=common["workers"],
        command=shlex.join(["specstack", *sys.argv[1:]]),
    )
    folder = common["out"] or Path("load", f"{scenario.name}-{datetime.now():%Y%m%d-%H%M%S}")
    comparison = Comparison(folder, manifest, files, sides, allow_remote)
    try:
        with ended_by_signals(), live_display(scenario) as display:
            summary = comparison.run(display, lambda words: click.echo(words, err=True))
    except (FolderError, LoadFailed, RemoteRefused, ServerUnusable) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        click.echo(f"to go on, run the same with --out {folder}", err=True)
        raise
    _print(summary, common["form"])
    fatal = [problem for problem in summary["problems"] if problem["fatal"]]
    for problem in summary["problems"]:
        click.echo(f"{'failed' if problem['fatal'] else 'note'}: {problem['text']}", err=True)
    if fatal:
        sys.exit(1)


def _print(summary: dict[str, Any], form: str) -> None:
    if form == "json":
        click.echo(json.dumps(summary, indent=2))
    else:
        print_summary(summary)
