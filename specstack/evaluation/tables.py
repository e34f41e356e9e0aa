"""A report as text: report.md and the short table on the terminal.

Every table with an accept length says that it counts the bonus token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from specstack.evaluation.measures import Estimate
from specstack.evaluation.report import ALL, ConfigurationReport, Report

LENGTH = "accept length (bonus included)"


def show(report: Report, console: Console) -> None:
    """Print the overall numbers."""
    table = Table("tree, budget", LENGTH, "accept rate", "drafts per round", "of the bound")
    for found in report.configurations:
        table.add_row(*_overall_row(found))
    console.print(table)
    chain = report.chain.overall
    alphas = " ".join(_number(alpha.value) for alpha in chain.alphas)
    console.print(f"alpha_k ({report.chain.configuration.name}): {alphas}")
    console.print(
        f"MAT (bonus included) {_estimate(chain.accept_length)}, "
        f"retention {_estimate(chain.retention)}"
    )
    for note in report.notes:
        console.print(note)


def markdown(report: Report) -> str:
    """The contents of report.md."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    facts = report.provenance
    yield f"# {facts['drafter']} drafts of {facts['target']}\n"
    yield (
        "The accept length counts the bonus token. Intervals are of 95 %, by a bootstrap over "
        "sequences.\n"
    )
    for note in report.notes:
        yield f"- {note}"
    yield "\n## Texts\n"
    yield from _table(
        ["data set", "sequences", "answer tokens"],
        [[name, str(num), str(tokens)] for name, (num, tokens) in report.texts.items()],
    )
    yield "\n## Trees and budgets\n"
    header = ["tree, budget", LENGTH, "accept rate", "drafts per round", "of the bound"]
    yield from _table(header, [_overall_row(found) for found in report.configurations])
    yield (
        "\nA round at the end of a text can emit no more than is left of it; the accept length is "
        "that of texts that go on. As served, ends included: "
        + ", ".join(
            f"{f.configuration.name}: {_estimate(f.overall.as_served)}"
            for f in report.configurations
        )
        + ". The bound is 1 + the sum of the largest path probabilities of the target.\n"
    )
    yield from _data_sets(report)
    yield from _drafters(report)
    yield from _alphas(report)
    yield from _positions(report)
    yield from _contexts(report)
    yield from _calibration(report)
    yield "\n## Provenance\n"
    yield from _table(["", ""], [[key, f"`{value}`"] for key, value in facts.items()])


def _data_sets(report: Report) -> Iterator[str]:
    yield "\n## Data sets\n"
    names = [*report.texts, ALL]
    names = [name for name in names if name in report.chain.per_data_set]
    yield from _table(
        [LENGTH, *names],
        [
            [f.configuration.name, *(_estimate(f.per_data_set[n].accept_length) for n in names)]
            for f in report.configurations
        ],
    )


def _drafters(report: Report) -> Iterator[str]:
    if not report.chain.overall.drafters:
        return
    yield "\n## Drafters of the merge\n"
    yield (
        "A draft that several drafters propose counts for each of them, so their shares may add up "
        "to more than 1.\n"
    )
    yield from _table(
        ["tree, budget", "data set", "drafter", "drafts", "right", "accept rate",
         "share of right drafts"],
        [
            [f.configuration.name, data_set, name, str(d.num_drafts), str(d.num_right),
             _estimate(d.accept_rate), _estimate(d.share)]
            for f in report.configurations
            for data_set, m in f.per_data_set.items()
            for name, d in m.drafters.items()
        ],
    )  # fmt: skip


def _alphas(report: Report) -> Iterator[str]:
    chain = report.chain
    yield f"\n## alpha_k of the chain ({chain.configuration.name})\n"
    yield "P(depth k right, given depth k - 1 right); no draft is a wrong one.\n"
    depths = [str(k) for k in range(1, chain.configuration.reach + 1)]
    rows = [
        [
            name,
            *(_number(alpha.value) for alpha in m.alphas),
            _estimate(m.accept_length),
            _estimate(m.retention),
        ]
        for name, m in chain.per_data_set.items()
    ]
    yield from _table(["data set", *depths, "MAT (bonus included)", "retention"], rows)
    yield "\n![](alpha.png)"


def _positions(report: Report) -> Iterator[str]:
    yield "\n## Acceptance per position\n"
    yield "Share of rounds in which the path is right down to this depth.\n"
    deepest = max(found.configuration.reach for found in report.configurations)
    rows = []
    for found in report.configurations:
        shares = [_number(share) for share in found.overall.survival]
        rows.append(
            [found.configuration.name, *shares, *["" for _ in range(deepest - len(shares))]]
        )
    yield from _table(["tree, budget", *map(str, range(1, deepest + 1))], rows)
    yield "\n![](accept_length.png)"


def _contexts(report: Report) -> Iterator[str]:
    yield "\n## Context lengths\n"
    buckets = list(dict.fromkeys(b for f in report.configurations for b in f.per_context))
    rows = []
    for found in report.configurations:
        cells = [found.per_context.get(bucket) for bucket in buckets]
        rows.append(
            [
                found.configuration.name,
                *("" if m is None else _estimate(m.accept_length) for m in cells),
            ]
        )
    yield from _table([LENGTH, *map(bucket_name, buckets)], rows)
    yield "\n![](context.png)"


def _calibration(report: Report) -> Iterator[str]:
    yield "\n## Calibration\n"
    yield (
        "Of drafts whose path the drafter gives a probability q, the share that is right. The "
        "budget's `min_survival` is a price in these probabilities.\n"
    )
    for found in report.configurations:
        yield f"\n{found.configuration.name}: mean distance {_number(found.calibration_error)}\n"
        yield from _table(
            ["q", "drafts", "mean q", "right"],
            [
                [
                    f"{b.low:g} to {b.high:g}",
                    str(b.num_drafts),
                    _number(b.mean_q),
                    _estimate(b.right),
                ]
                for b in found.bins
            ],
        )
    yield "\n![](calibration.png)"


def bucket_name(bucket: tuple[int, int]) -> str:
    """A range of context lengths."""
    low, high = bucket
    return f"{low} and more" if high >= 1 << 30 else f"{low} to {high - 1}"


def _overall_row(found: ConfigurationReport) -> list[str]:
    m = found.overall
    return [
        found.configuration.name,
        _estimate(m.accept_length),
        _estimate(m.accept_rate),
        _number(m.drafts_per_round, 2),
        _number(found.efficiency, 2),
    ]


def _estimate(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
