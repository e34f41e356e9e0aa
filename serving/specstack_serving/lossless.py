"""`specstack lossless`: does the pipeline emit exactly what plain decoding emits?

Greedy decoding in float32. Two forwards of different shapes round differently, so where the two
best tokens of the target are closer than the rounding, either is right: such a difference is
reported as a near-tie with its gap, any other one is a real divergence.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specstack.applications import PLAIN_OVERRIDES
from specstack.plan import Plan
from specstack.prompts import read_prompts
from specstack_serving.generate import (
    Generation,
    RequestRefused,
    chat_ids,
    generate,
)
from specstack_serving.launch import ServerFailed, running_server
from specstack_serving.main import prepare


@dataclass(frozen=True)
class Difference:
    """The first token at which one prompt's two outputs differ."""

    prompt: str
    position: int
    plain_token: int | None
    """None: this output had ended."""
    speculative_token: int | None
    gap: float | None
    """log p(best) - log p(second best) of plain decoding there, in nats.

    None: the two are not its two best tokens."""
    near_tie: bool


@dataclass(frozen=True)
class Report:
    """The outcome at one concurrency."""

    concurrency: int
    num_prompts: int
    num_tokens: int
    accept_length: float
    """Mean emitted tokens per round of the speculative server, bonus included."""
    differences: tuple[Difference, ...]

    @property
    def diverged(self) -> bool:
        """Whether anything but a near-tie differs."""
        return any(not d.near_tie for d in self.differences)


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option(
    "--prompts", "prompt_file", required=True, type=click.Path(exists=True, path_type=Path)
)
@click.option("--num", default=None, type=click.IntRange(min=1), help="Use the first NUM prompts.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--concurrency",
    "levels",
    multiple=True,
    default=(1, 8),
    show_default=True,
    type=click.IntRange(min=1),
    help="Repeat for several levels.",
)
@click.option(
    "--tie", default=1e-4, show_default=True, help="Gap in nats below which two tokens tie."
)
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def lossless(
    pipeline: Path,
    prompt_file: Path,
    num: int | None,
    max_tokens: int,
    levels: tuple[int, ...],
    tie: float,
    overrides: tuple[str, ...],
    form: str,
) -> None:
    """Compare PIPELINE with plain decoding, token by token.

    Starts a plain and a speculative server one after the other. Exit code 1 on a real divergence.

    \b
    specstack lossless dsl/specs/quickstart.yaml --prompts prompts.jsonl --num 100
    """
    console = Console(stderr=form == "json", markup=False)
    try:
        prompts = read_prompts(prompt_file, num)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    plain, speculative = (
        prepare(pipeline, (*overrides, "target.dtype=float32", *extra))
        for extra in (PLAIN_OVERRIDES, ())
    )
    if not speculative.speculates:
        raise click.ClickException(f"{pipeline} drafts nothing: there is nothing to compare")
    inputs = chat_ids(plain.target.path, prompts)
    params = {"temperature": 0.0, "max_new_tokens": max_tokens}
    with _progress(console, len(inputs) * len(levels) * 2) as advance:
        try:
            expected, outputs = (
                _run(plan, inputs, params, levels, advance) for plan in (plain, speculative)
            )
        except (ServerFailed, RequestRefused) as error:
            raise click.ClickException(str(error)) from None
        except httpx.TransportError as error:
            raise click.ClickException(f"the server ended during a request: {error!r}") from None
    names = [p.id for p in prompts]
    reports = [_report(level, names, expected[level], outputs[level], tie) for level in levels]
    if form == "json":
        click.echo(json.dumps([asdict(r) | {"diverged": r.diverged} for r in reports], indent=2))
    else:
        _print(console, reports)
    sys.exit(1 if any(r.diverged for r in reports) else 0)


def _run(
    plan: Plan,
    inputs: list[list[int]],
    params: dict[str, Any],
    levels: tuple[int, ...],
    advance: Any,
) -> dict[int, list[Generation]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(plan, Path(folder, "server.log")) as url,
    ):
        return {
            level: generate(url, inputs, params, concurrency=level, on_done=advance,
                            return_logprob=True, top_logprobs_num=2)
            for level in levels
        }  # fmt: skip


def _report(
    level: int, names: list[str], plain: list[Generation], speculative: list[Generation], tie: float
) -> Report:
    return Report(
        concurrency=level,
        num_prompts=len(names),
        num_tokens=sum(len(g.output_ids) for g in speculative),
        accept_length=_accept_length(speculative),
        differences=tuple(_differences(names, plain, speculative, tie)),
    )


def _differences(
    names: list[str], plain: list[Generation], speculative: list[Generation], tie: float
) -> Iterator[Difference]:
    for name, a, b in zip(names, plain, speculative, strict=True):
        if a.output_ids == b.output_ids:
            continue
        longest = max(len(a.output_ids), len(b.output_ids))
        left = [*a.output_ids, *[None] * (longest - len(a.output_ids))]
        right = [*b.output_ids, *[None] * (longest - len(b.output_ids))]
        position = next(i for i in range(longest) if left[i] != right[i])
        gap = _gap(a, {left[position], right[position]}, position)
        near_tie = gap is not None and gap < tie
        yield Difference(name, position, left[position], right[position], gap, near_tie)


def _gap(plain: Generation, tokens: set[int | None], position: int) -> float | None:
    """Distance of `tokens` in plain decoding; None unless they are the two best ones there.

    An output that had ended is no matter of rounding: the token that ends it is one of it.
    """
    tops = plain.meta["output_top_logprobs"]
    if position >= len(tops) or {entry[1] for entry in tops[position][:2]} != tokens:
        return None
    best, second = (entry[0] for entry in tops[position][:2])
    return float(best - second)


def _accept_length(generations: list[Generation]) -> float:
    rounds = sum(g.meta.get("spec_verify_ct", 0) for g in generations)
    tokens = sum(len(g.output_ids) - 1 for g in generations)  # the first comes from the prefill
    return tokens / rounds if rounds else 1.0


def _print(console: Console, reports: list[Report]) -> None:
    for report in reports:
        verdict = "DIVERGED" if report.diverged else "identical"
        if report.differences and not report.diverged:
            verdict = f"identical but for {len(report.differences)} near-ties"
        console.print(
            f"concurrency {report.concurrency}: {verdict}, {report.num_prompts} prompts, "
            f"{report.num_tokens} tokens, accept length {report.accept_length:.2f}"
        )
        if report.differences:
            table = Table("prompt", "position", "plain", "speculative", "gap (nats)", "verdict")
            for d in report.differences:
                kind = "near-tie" if d.near_tie else "divergence"
                gap = "-" if d.gap is None else f"{d.gap:.2e}"
                row = (d.position, d.plain_token, d.speculative_token, gap, kind)
                table.add_row(d.prompt, *map(str, row))
            console.print(table)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Any]:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda: progress.advance(task)
