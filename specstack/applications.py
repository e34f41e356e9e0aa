"""Commands that live in other packages, named as strings and imported when they are called."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import click

from specstack_dsl.errors import did_you_mean


class Application(NamedTuple):
    """A command that lives in another package."""

    target: str
    """`module:function` of a click command."""
    summary: str
    """Shown by `specstack --help`, which does not import the command."""
    extra: str = "serve"
    """The optional dependencies of specstack that it needs."""


APPLICATIONS = {
    "serve": Application("specstack_serving.main:serve", "Serve a pipeline with SGLang."),
    "doctor": Application(
        "specstack_serving.doctor:doctor", "Check this installation, SGLang included."
    ),
    "lossless": Application(
        "specstack_serving.lossless:lossless",
        "Compare a pipeline with plain decoding, token by token.",
    ),
    "bench": Application(
        "specstack_serving.bench_cli:bench", "Measure what a pipeline's rounds cost."
    ),
    "simulate": Application(
        "specstack.simulation.cli:simulate",
        "Compare budget policies without a model.",
        extra="train",
    ),
    "load": Application(
        "specstack_loadtest.cli:load_test",
        "Load tests: run scenarios, compare pipelines, report.",
        extra="loadtest",
    ),
    "models": Application("specstack.models.cli:models", "List and get packaged models."),
    "draft": Application(
        "specstack.training.cli:draft",
        "Make draft heads: answers, training, evaluation.",
        extra="train",
    ),
}

PIPELINE_SERVER = "specstack_serving.launch:pipeline_server"
"""(pipeline file, overrides, log=file) -> context manager of the base URL of a server of it."""

PLAIN_OVERRIDES = ("drafter=none", "budget={kind: fixed, draft_budget: 0}")
"""Overrides that turn a pipeline into plain decoding of the same target."""


def load(target: str, *, needed_by: str, extra: str) -> Any:
    """Import what `module:name` names.

    Raises:
        click.ClickException: a package is missing; names the optional dependencies to install.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{needed_by} needs the Python package {error.name!r}: pip install 'specstack[{extra}]'"
        ) from error


class LazyGroup(click.Group):
    """A group whose applications are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *APPLICATIONS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in APPLICATIONS:
            return super().get_command(ctx, cmd_name)
        application = APPLICATIONS[cmd_name]
        command: click.Command = load(
            application.target, needed_by=cmd_name, extra=application.extra
        )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            ctx.fail(f"no command {args[0]!r}{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: command.get_short_help_str(80) for name, command in self.commands.items()}
        rows = [*own.items(), *((name, app.summary) for name, app in APPLICATIONS.items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
