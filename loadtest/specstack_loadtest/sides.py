"""What is compared: a server of a pipeline, the same without speculation, or one that runs already.

A side starts for the length of a block and has a base URL meanwhile. Servers of pipelines are
started one at a time, so that each has the whole machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specstack.applications import PIPELINE_SERVER, PLAIN_OVERRIDES, load
from specstack.plan import plan_file
from specstack_dsl import load as load_pipeline
from specstack_loadtest.folder import is_name

PLAIN = "plain"
"""Name of the baseline: plain decoding of the same target."""

Start = Callable[[Path], AbstractContextManager[str]]
"""(file for the server's log) -> context manager of the base URL."""


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    name: str
    facts: dict[str, Any]
    """For the manifest: what it is."""
    start: Start
    opt_out: bool = False
    """Its requests ask not to speculate."""
    model: str | None = None
    """Which one, of a server with several."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise click.ClickException(f"{self.name!r} cannot name a side: it names a folder, too")


def pipeline_sides(
    pipelines: Sequence[str], overrides: tuple[str, ...], plain: bool
) -> tuple[Side, ...]:
    """One side per pipeline, named by its file or by `NAME=FILE`; before them plain decoding.

    Plain decoding takes target and engine from the first pipeline.

    Raises:
        click.ClickException: two have one name, or a name is no name of a folder.
        SpecError, PlanError: a pipeline is wrong, or cannot run with its model or on this machine:
            known before any is started, not at its turn hours later.
    """
    sides: list[Side] = []
    for text in pipelines:
        name, file = _named(text)
        if name == PLAIN:
            raise click.ClickException(f"--pipeline {text}: {PLAIN!r} is the baseline's name")
        if name in (side.name for side in sides):
            raise click.ClickException(
                f"two pipelines are called {name!r}: tell them apart, --pipeline NAME={file}"
            )
        sides.append(_pipeline_side(name, Path(file), overrides))
    if plain:
        file = _named(pipelines[0])[1]
        sides.insert(0, _pipeline_side(PLAIN, Path(file), (*overrides, *PLAIN_OVERRIDES)))
    return tuple(sides)


def url_side(name: str, url: str, *, model: str | None = None, opt_out: bool = False) -> Side:
    """A server that runs already."""

    @contextmanager
    def start(log: Path) -> Iterator[str]:
        yield url

    return Side(name, {"url": url, "model": model, "opt_out": opt_out}, start, opt_out, model)


def _named(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    return (name, file) if equals else (Path(text).stem, text)


def _pipeline_side(name: str, file: Path, overrides: tuple[str, ...]) -> Side:
    if not file.is_file():
        raise click.ClickException(f"--pipeline: {file}: no such file")

    def start(log: Path) -> AbstractContextManager[str]:
        serve = load(PIPELINE_SERVER, needed_by="--pipeline", extra="serve")
        server: AbstractContextManager[str] = serve(file, overrides, log=log)
        return server

    plan_file(file, overrides)
    text = load_pipeline(file, overrides).model_dump_json()
    facts = {
        "pipeline": str(file),
        "overrides": list(overrides),
        "pipeline_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return Side(name, facts, start)
