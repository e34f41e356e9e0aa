"""The summary on a terminal: a table per phase, a row per side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from specstack.terminal import report_console


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print throughput, latencies and acceptance of every side and phase on standard output."""
    console = report_console()
    versus = {(one["side"], one["phase"]): one for one in summary["comparisons"]}
    for phase in summary["phases"]:
        shown = Table(title=f"{summary['scenario']['name']}: {phase['name']}", title_justify="left")
        shown.add_column("side")
        for head in ("tokens/s", "of plain", "requests"):
            shown.add_column(head, justify="right")
        for head in ("TTFT ms", "TPOT ms", "ITL ms", "end to end ms"):
            shown.add_column(f"{head}\np50 / p99", justify="right")
        shown.add_column("accept\nlength", justify="right")
        shown.add_column("verdict")
        for result in summary["results"]:
            if result["phase"] == phase["number"]:
                shown.add_row(*_row(result, versus.get((result["side"], result["phase"]))))
        console.print(shown)
    console.print("(low to high): 95 %; -: too few requests; accept length counts the bonus token")


def _row(result: Mapping[str, Any], versus: Mapping[str, Any] | None) -> list[str]:
    requests = result["requests"]
    failed = f" ({requests['failed']} failed)" if requests["failed"] else ""
    counters = (result["acceptance"] or {}).get("counters") or {}
    return [
        result["side"],
        _estimate(result["tokens_per_s"], 1),
        "" if versus is None else _estimate(versus["tokens_per_s_ratio"], 2),
        f"{requests['measured']}{failed}",
        *(
            " / ".join(_number(result[name][point]["value"], 0) for point in ("p50", "p99"))
            for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
        ),
        _number(counters.get("accept_length"), 2),
        "" if versus is None else versus["verdict"],
    ]


def _estimate(found: Mapping[str, Any], digits: int) -> str:
    value = _number(found["value"], digits)
    if found["low"] is None or found["high"] is None:
        return value
    return f"{value} ({_number(found['low'], digits)} to {_number(found['high'], digits)})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
