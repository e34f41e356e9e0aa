"""The command line. Commands over the language need neither torch nor SGLang.

Commands of the applications are named as `module:function` and imported when they are run, so that
`specstack check` starts in a fraction of a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from specstack import __version__
from specstack.applications import LazyGroup
from specstack.models.errors import ModelError
from specstack_dsl import PlanError, SpecError
from specstack_dsl.errors import ProblemsError
from specstack_dsl.parts import CatalogueError

EXIT_CODES = """
\b
Exit codes:
  0    done
  1    another failure
  2    the pipeline text, or this command line, is wrong
  3    the pipeline does not fit the model, the device or SGLang
  130  interrupted
"""
SPEC_ERROR, PLAN_ERROR, INTERRUPTED = 2, 3, 130


@click.group(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="specstack")
def cli() -> None:
    """Speculative decoding pipelines in YAML, served by SGLang.

    \b
    Examples:
      specstack check dsl/specs/*.yaml
      specstack explain dsl/specs/quickstart.yaml
      specstack serve dsl/specs/quickstart.yaml
    """


def _overrides(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="PATH=VALUE",
        help="Override one value, for example --set tree.depth=4. May be repeated.",
    )(command)


def _format(*choices: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--format", "form", type=click.Choice(choices), default=choices[0], show_default=True
    )


def _echo_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


@cli.command(epilog=EXIT_CODES, short_help="Check pipeline files.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@_format("text", "json", "sarif")
@_overrides
def check(files: tuple[str, ...], form: str, overrides: tuple[str, ...]) -> None:
    """Check pipeline files: the text, and its target's config where that is on this machine.

    Prints every problem as file:line:column: path: message. Does not ask whether this machine can
    run the pipeline; `specstack explain` does.

    \b
    Examples:
      specstack check my.yaml
      specstack check pipelines/*.yaml --format sarif > problems.sarif
      specstack check my.yaml --set tree.depth=4
    """
    from specstack.facts import HostFacts
    from specstack.plan import plan_file
    from specstack_dsl.report import as_json, as_sarif

    problems: dict[str, Any] = {}
    code = 0
    for file in files:
        problems[file] = ()
        try:
            plan = plan_file(file, overrides, host_facts=HostFacts.unknown())
        except ProblemsError as error:
            problems[file] = error.problems
            worse = SPEC_ERROR if isinstance(error, SpecError) else PLAN_ERROR
            code = worse if code in (0, PLAN_ERROR) else code
            if form == "text":
                click.echo(str(error))
        else:
            if form == "text":
                click.echo(f"{file}: ok")
                for warning in plan.warnings:
                    click.echo(f"{file}: warning: {warning}")
    if form == "json":
        _echo_json(as_json(problems))
    elif form == "sarif":
        _echo_json(as_sarif(problems, __version__))
    sys.exit(code)


@cli.command(epilog=EXIT_CODES, short_help="Show what a pipeline becomes on this machine, and why.")
@click.argument("file")
@_format("text", "json")
@_overrides
def explain(file: str, form: str, overrides: tuple[str, ...]) -> None:
    """Show what a pipeline becomes on this machine: every value and where it came from.

    \b
    Examples:
      specstack explain my.yaml
      specstack explain my.yaml --set engine.device=cpu --format json
    """
    from specstack.explain import explain as gather
    from specstack.explain import show
    from specstack.facts import HostFacts, model_facts
    from specstack.plan import compile
    from specstack_dsl import load

    pipeline = load(file, overrides)
    facts = model_facts(pipeline)
    plan = compile(pipeline, model_facts=facts, host_facts=HostFacts.detect())
    explanation = gather(pipeline, plan)
    if form == "json":
        _echo_json(explanation.as_data())
        return
    from specstack.terminal import report_console

    show(explanation, report_console())


@cli.command(short_help="Print the JSON Schema of pipeline files.")
def schema() -> None:
    """Print the JSON Schema of pipeline files, third-party parts included.

    \b
    Examples:
      specstack schema > pipeline.schema.json
    """
    from specstack_dsl.schema import json_schema

    _echo_json(json_schema())


@cli.command(short_help="List or describe the parts of the language.")
@click.argument("kind", required=False)
def parts(kind: str | None) -> None:
    """List the parts that a pipeline can choose from, or describe the section or kind KIND.

    \b
    Examples:
      specstack parts
      specstack parts ngram
      specstack parts budget
    """
    from specstack.parts_help import describe, overview

    click.echo(overview() if kind is None else describe(kind))


@cli.command("compile", epilog=EXIT_CODES, short_help="Write the plan of a pipeline as JSON.")
@click.argument("file")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: standard output.")
@_overrides
def compile_command(file: str, output: Path | None, overrides: tuple[str, ...]) -> None:
    """Write the plan of a pipeline for this machine as JSON.

    \b
    Examples:
      specstack compile my.yaml -o plan.json
    """
    from specstack.plan import plan_file

    text = plan_file(file, overrides).model_dump_json(indent=2)
    if output is None:
        click.echo(text)
    else:
        output.write_text(text + "\n", "utf-8")


@cli.command(epilog=EXIT_CODES, short_help="Show what differs between two pipelines.")
@click.argument("a")
@click.argument("b")
@_format("text", "json")
def diff(a: str, b: str, form: str) -> None:
    """Show what differs between two pipelines once everything is resolved for this machine.

    \b
    Examples:
      specstack diff chain.yaml tree.yaml
    """
    from specstack.explain import flat_values
    from specstack.plan import plan_file

    one, two = (flat_values(plan_file(file)) for file in (a, b))
    changed = {
        path: [one.get(path), two.get(path)]
        for path in [*one, *(path for path in two if path not in one)]
        if one.get(path) != two.get(path)
    }
    if form == "json":
        _echo_json(changed)
        return
    for path, (before, after) in changed.items():
        click.echo(f"{path}: {json.dumps(before)} -> {json.dumps(after)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors of the user's get no traceback."""
    try:
        result = cli.main(args=argv, prog_name="specstack", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except SpecError as error:
        click.echo(str(error), err=True)
        return SPEC_ERROR
    except PlanError as error:
        click.echo(str(error), err=True)
        return PLAN_ERROR
    except (CatalogueError, ModelError, OSError) as error:
        click.echo(f"specstack: {error}", err=True)
        return 1
    return result if isinstance(result, int) else 0
