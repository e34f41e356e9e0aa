"""The numbers of a folder: a pure function of its manifest, its scenario and its raw files.

The same folder gives the same bytes: draws are seeded, and numbers are rounded to six digits. Units
stand in names; `low` and `high` are the ends of a 95 % interval; None is what is not known.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specstack_loadtest import answers, server_view
from specstack_loadtest.arrivals import Phase, phases_of
from specstack_loadtest.bounds import Signs, bound_of
from specstack_loadtest.cell import Cell
from specstack_loadtest.estimates import Distribution
from specstack_loadtest.folder import SCENARIO, Manifest
from specstack_loadtest.outputs import Agreement, compare_outputs, compare_repeats, differs_beyond
from specstack_loadtest.paired import compare
from specstack_loadtest.problems import problems_of
from specstack_loadtest.records import kinds_of_errors
from specstack_loadtest.runs import Part, Run, read_runs
from specstack_loadtest.saturation import verdict
from specstack_loadtest.scenario import Scenario
from specstack_loadtest.scenario_file import load_scenario
from specstack_loadtest.server_identity import identity
from specstack_loadtest.timeline import timeline

SUMMARY, TABLE = "summary.json", "summary.csv"
DIGITS = 6
CURVES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


def summarise(folder: Path) -> dict[str, Any]:
    """Compute everything.

    Raises:
        FolderError, SpecError, ValueError: manifest, scenario or a raw file is not what it should
            be; names it.
    """
    manifest = Manifest.read(folder)
    scenario = load_scenario(str(folder / SCENARIO))
    phases = phases_of(scenario)
    runs = list(read_runs(folder, manifest.sides, manifest.repeats))
    found = [Cell.of(side, phase, runs) for side in manifest.sides for phase in phases]
    cells = [cell for cell in found if cell is not None]
    summary: dict[str, Any] = {
        "version": 1,
        "scenario": _scenario_data(scenario),
        "sides": list(manifest.sides),
        "baseline": manifest.baseline,
        "repeats": manifest.repeats,
        "phases": [_phase_data(phase) for phase in phases],
        "results": [_result(cell, scenario) for cell in cells],
        "comparisons": list(_comparisons(cells, manifest.baseline)),
        "outputs": _outputs(runs, manifest),
        "runs": [_run_data(run) for run in runs],
        "timelines": [timeline(run) for run in runs],
    }
    summary["problems"] = [one.as_data() for one in problems_of(summary)]
    rounded: dict[str, Any] = _rounded(summary)
    return rounded


def as_text(summary: dict[str, Any]) -> str:
    """The contents of summary.json."""
    return json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_summary(folder: Path) -> None:
    """Write summary.json and summary.csv, one row per side and phase.

    Raises:
        As `summarise`.
    """
    summary = summarise(folder)
    (folder / SUMMARY).write_text(as_text(summary), "utf-8")
    (folder / TABLE).write_text(as_csv(summary), "utf-8")


def as_csv(summary: dict[str, Any]) -> str:
    """The contents of summary.csv."""
    rows = [_row(summary, result) for result in summary["results"]]
    if not rows:
        return ""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _row(summary: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    key = (result["side"], result["phase"])
    phase = summary["phases"][result["phase"]]
    versus = next((c for c in summary["comparisons"] if (c["side"], c["phase"]) == key), None)
    acceptance = (result["acceptance"] or {}).get("counters") or {}
    row: dict[str, Any] = {
        "side": result["side"],
        "phase": phase["name"],
        "requests": result["requests"]["measured"],
        "failed": result["requests"]["failed"],
    }
    for name in ("tokens_per_s", "answers_per_s"):
        row |= {f"{name}{end}": result[name][key] for end, key in _ENDS}
    ratio = {} if versus is None else versus["tokens_per_s_ratio"]
    row |= {f"tokens_per_s_ratio{end}": ratio.get(key) for end, key in _ENDS}
    row["verdict"] = None if versus is None else versus["verdict"]
    for name in CURVES:
        row[f"{name}_count"] = result[name]["count"]
        row |= {f"{name}_{p}": result[name][p]["value"] for p in _POINTS}
        row[f"{name}_max"] = result[name]["max"]
    row["good_share"] = None if result["good"] is None else result["good"]["share"]["value"]
    row["in_flight_mean"] = result["in_flight"]["mean"]
    row["accept_length_bonus_included"] = acceptance.get("accept_length")
    row["bound"] = result["bound"]["kind"]
    return row


_ENDS = (("", "value"), ("_low", "low"), ("_high", "high"))
_POINTS = ("mean", "p50", "p90", "p95", "p99")


def _scenario_data(scenario: Scenario) -> dict[str, Any]:
    return {
        "name": scenario.name,
        "description": scenario.description,
        "kind": scenario.arrivals.kind,
        "seed": scenario.seed,
        "slo": scenario.slo.model_dump(mode="json"),
        "warmup": scenario.warmup.model_dump(mode="json"),
        "stop": scenario.stop.model_dump(mode="json"),
        "timeout_s": scenario.timeout_s,
    }


def _phase_data(phase: Phase) -> dict[str, Any]:
    return {
        "number": phase.number,
        "name": phase.name,
        "users": phase.users,
        "rate": phase.rate,
        "starts_s": phase.starts_s,
        "warmup_s": phase.warmup_s,
        "warmup_requests": phase.warmup_requests,
        "seconds": phase.seconds,
        "requests": phase.requests,
    }


def _result(cell: Cell, scenario: Scenario) -> dict[str, Any]:
    distributions = {**cell.latencies, "itl_ms": cell.gaps}
    records = cell.records
    samples = [sample for part in cell.parts for sample in part.samples()]
    client = vars(verdict(samples, records))
    in_flight = [part.in_flight() for part in cell.parts]
    while_due = list(_while_due(cell))
    due = [record for part in while_due for record in part.records]
    return {
        "side": cell.side,
        "phase": cell.phase.number,
        "measured_s": cell.seconds,
        "parts": [
            {
                "repeat": part.run.repeat,
                "start_s": part.start_s,
                "end_s": part.end_s,
                "cut": part.is_cut,
                "requests": len(part.records),
                "failed": sum(record.error is not None for record in part.records),
                "tokens_per_s": part.tokens().rate,
            }
            for part in cell.parts
        ],
        "requests": {
            "measured": len(records),
            "answered": sum(record.error is None for record in records),
            "failed": sum(record.error is not None for record in records),
            "errors": kinds_of_errors(records),
            "finish_reasons": cell.finish_reasons(),
        },
        "due_per_s": _per_s(len(due), while_due),
        "asked_tokens_per_s": _per_s(sum(record.max_tokens for record in due), while_due),
        "tokens_per_s": cell.tokens_per_s().as_data(),
        "tokens_per_chunk": cell.tokens_per_chunk(),
        "answers_per_s": cell.answers_per_s().as_data(),
        **{name: found.as_data(1e3) for name, found in distributions.items()},
        "request_tokens_per_s": cell.of_requests(answers.tokens_per_s).as_data(),
        "good": cell.good(scenario.slo),
        "in_flight": {
            "mean": sum(mean for mean, _ in in_flight) / len(in_flight),
            "max": max(most for _, most in in_flight),
        },
        "server": server_view.server_load(cell),
        "acceptance": server_view.acceptance(cell),
        "budget": server_view.budgets(cell),
        "prefix_cache": server_view.prefix_cache(cell),
        "client": client,
        "bound": bound_of(_signs(cell, client, while_due)).as_data(),
        "curves": {name: _curve(distributions[name]) for name in CURVES},
    }


def _while_due(cell: Cell) -> Iterator[Part]:
    """The parts as long as requests were due. Where a number of requests ends an open loop, its
    last arrival does: answers that come after it were not given in the time of the load.
    """
    for part in cell.parts:
        if cell.phase.users is not None or cell.phase.seconds is not None:
            yield part
            continue
        arrivals = [record.due_s for record in part.records if record.turn == 0]
        end_s = max(arrivals, default=part.start_s)
        if end_s > part.start_s:
            due = tuple(record for record in part.records if record.due_s < end_s)
            yield replace(part, end_s=end_s, records=due)


def _per_s(amount: float, parts: Sequence[Part]) -> float | None:
    return amount / sum(part.seconds for part in parts) if parts else None


def _signs(cell: Cell, client: dict[str, Any], while_due: Sequence[Part]) -> Signs:
    num_due = sum(len(part.records) for part in while_due)
    num_answers = float(sum(part.answers().amounts.sum() for part in while_due))
    is_closed = cell.phase.users is not None
    return Signs.of(
        cell,
        client["sentence"] if client["saturated"] else None,
        None if is_closed or not num_due else num_answers / num_due,
    )


def _curve(found: Distribution) -> list[float]:
    return [value * 1e3 for value in found.curve]


def _comparisons(cells: Sequence[Cell], baseline: str | None) -> Iterator[dict[str, Any]]:
    of_baseline = {cell.phase.number: cell for cell in cells if cell.side == baseline}
    for cell in cells:
        if cell.side != baseline and cell.phase.number in of_baseline:
            yield compare(cell, of_baseline[cell.phase.number])


def _outputs(runs: Sequence[Run], manifest: Manifest) -> dict[str, Any] | None:
    """None: there is no baseline to compare with."""
    if manifest.baseline is None:
        return None
    by_side = {side: [run for run in runs if run.side == side] for side in manifest.sides}
    baseline = by_side[manifest.baseline]
    control = compare_repeats(baseline)
    found = {
        side: compare_outputs(by_side[side], baseline)
        for side in manifest.sides
        if side != manifest.baseline
    }
    return {
        "control": None if control is None else control.as_data(),
        "sides": {side: _against(one, control) for side, one in found.items()},
    }


def _against(found: Agreement, control: Agreement | None) -> dict[str, Any]:
    return {**found.as_data(), "beyond_control": differs_beyond(found, control)}


def _run_data(run: Run) -> dict[str, Any]:
    return {
        "side": run.side,
        "repeat": run.repeat,
        "complete": run.is_whole,
        "reason": str(run.outcome.get("reason") or ""),
        "requests": len(run.records),
        "failed": sum(record.error is not None for record in run.records),
        "seconds": run.ended_s,
        "cache_flushed": bool(run.outcome.get("cache_flushed")),
        "server": {**_told(run.outcome), **identity(run.server)},
    }


def _told(outcome: dict[str, Any]) -> dict[str, str]:
    """What the client found out about the server."""
    return {key: str(outcome[key]) for key in ("url", "model", "dialect") if key in outcome}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        rounded = float(f"{value:.{DIGITS}g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
