"""`specstack bench`: measurements of a server. `cost`: what its rounds take, into a cost table.

Standard output carries the table or JSON; progress and problems go to standard error.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from specstack.budget.cost_store import read_table, save_table
from specstack.budget.cost_table import CostTable, CostTableError
from specstack.cli import EXIT_CODES
from specstack.plan import PartPlan, Plan, plan_file
from specstack.terminal import report_console
from specstack_serving.cost_sweep import (
    MAX_REQUESTS,
    SweepError,
    groups_of,
    server_status,
    sweep,
    vocab_to_send,
)
from specstack_serving.launch import ServerFailed, running_server
from specstack_serving.main import prepare

IDLE_POLICY = "specstack.budget.fixed:FixedPolicy"


@click.group()
def bench() -> None:
    """Measure a server."""


@bench.command(epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.argument("pipeline", type=click.Path(path_type=Path), metavar="PIPELINE.yaml")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="As in `serve`.")
@click.option("--url", help="Measure the server that runs PIPELINE there. Default: start one.")
@click.option("--api-key", metavar="KEY", help="Of the server at --url, if it has one.")
@click.option("--admin-key", metavar="KEY", help="Its admin key. Default: the API key.")
@click.option("--coarse", is_flag=True, help="Fewer batch sizes and rounds.")
@click.option(
    "--max-requests", type=click.IntRange(min=1), metavar="NUM",
    help=f"Largest batch. Default: what the server runs, up to {MAX_REQUESTS}.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the table here, too.",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
def cost(
    pipeline: Path,
    overrides: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    admin_key: str | None,
    coarse: bool,
    max_requests: int | None,
    output: Path | None,
    form: str,
) -> None:
    """Measure what rounds of PIPELINE.yaml take on this machine, and keep it for its budget policy.

    Starts a server, forces every budget at several batch sizes and contexts, fits a table that
    rises along all of them, and stores it where the server will find it. Other load on the machine
    makes the table wrong.

    \b
    Examples:
      specstack bench cost dsl/specs/quickstart.yaml
      specstack bench cost my.yaml --coarse --format json
      specstack bench cost my.yaml --url http://127.0.0.1:30000 -o costs.json
    """
    plan = prepare(pipeline, overrides) if url is None else plan_file(pipeline, overrides)
    if not plan.speculates:
        raise click.ClickException(f"{pipeline} drafts nothing: there is nothing to choose")
    command = ["specstack", "bench", "cost", str(pipeline), *(["--coarse"] if coarse else [])]
    command += [word for override in overrides for word in ("--set", override)]
    try:
        path, seconds = _measure(
            plan, url, (api_key, admin_key or api_key), coarse, max_requests, shlex.join(command)
        )
        if url is not None and not path.exists():
            _show_remote(path, output)
            return
        table = read_table(path)
    except (ServerFailed, SweepError, CostTableError) as error:
        raise click.ClickException(str(error)) from None
    except httpx.TransportError as error:
        raise click.ClickException(f"the server cannot be reached: {error!r}") from None
    if output is not None:
        save_table(table, output)
    _print(table, path, seconds, form)


def _measure(
    plan: Plan,
    url: str | None,
    keys: tuple[str | None, str | None],
    coarse: bool,
    max_requests: int | None,
    command: str,
) -> tuple[Path, float]:
    """Path of the stored table, and how long the measurement took.

    Args:
        keys: the server's API key and admin key.
    """
    api_key, admin_key = keys
    with _server(plan, url) as base:
        began = time.monotonic()
        status = server_status(base, api_key)
        _check_max_requests(status, max_requests)
        groups = groups_of(plan, status, coarse=coarse, max_requests=max_requests)
        with _progress() as say:
            measured = sweep(
                base, groups, command=command, say=say, api_key=api_key, admin_key=admin_key,
                vocab_size=vocab_to_send(plan),
            )  # fmt: skip
            answer = asyncio.run(measured)
        if answer["path"] is None:
            raise click.ClickException(f"the table is not stored: {answer.get('not_stored')}")
        return Path(answer["path"]), time.monotonic() - began


def _show_remote(path: Path, output: Path | None) -> None:
    click.echo(f"specstack: stored on the server's machine, and in use there: {path}", err=True)
    if output is not None:
        raise click.ClickException(f"{output} is not written: copy the file from there")


@contextmanager
def _server(plan: Plan, url: str | None) -> Iterator[str]:
    if url is not None:
        yield url.rstrip("/")
        return
    click.echo(f"specstack: starting {plan.target.model} on {plan.engine.device}", err=True)
    # Every budget is forced, so nobody decides; one who did would have costs measured first.
    idle = PartPlan(kind="fixed", implementation=IDLE_POLICY, options={"draft_budget": 0})
    plan = plan.model_copy(update={"budget": idle, "shadow": None})
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(plan, Path(folder, "server.log")) as base,
    ):
        yield base


def _check_max_requests(status: dict[str, Any], wanted: int | None) -> None:
    runs = status["max_running_requests"]
    if wanted is not None and runs is not None and wanted > runs:
        raise click.ClickException(f"--max-requests {wanted}: the server runs {runs} at a time")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("measuring")

        def say(text: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            if text:
                progress.update(task, description=text)

        yield say


def break_even(table: CostTable) -> list[dict[str, Any]]:
    """Per batch size and context: milliseconds of a full round by budget, and the accept length
    (emitted tokens per request and round, at least 1) from which it is worth its time."""
    rows = []
    for r, num_requests in enumerate(table.num_requests):
        for c, context in enumerate(table.contexts):
            steps = [
                table.verify_ms[r][w][c] + table.draft_ms[r][w]
                for w in range(len(table.draft_budgets))
            ]
            rows.append(
                {
                    "num_requests": num_requests,
                    "context": context,
                    "step_ms": [round(ms, 3) for ms in steps],
                    "break_even": [round(ms / steps[0], 3) for ms in steps],
                }
            )
    return rows


def _print(table: CostTable, path: Path, seconds: float, form: str) -> None:
    rows = break_even(table)
    if form == "json":
        content = {"path": str(path), "seconds": round(seconds, 1), "rounds": rows}
        click.echo(json.dumps({**content, "table": table.model_dump(mode="json")}, indent=2))
        return
    console = report_console()
    shown = Table("requests", "context", *(f"budget {b}" for b in table.draft_budgets))
    for row in rows:
        cells = zip(row["step_ms"], row["break_even"], strict=True)
        times = [f"{ms:.1f} ms {ratio:5.2f}x" for ms, ratio in cells]
        shown.add_row(str(row["num_requests"]), str(row["context"]), *times)
    console.print(shown)
    console.print(
        "x: times plain decoding, which is the accept length from which a budget pays"
        f"; {table.num_rounds} rounds in {seconds:.0f} s"
    )
    click.echo(path)
