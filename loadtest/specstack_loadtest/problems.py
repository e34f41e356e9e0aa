"""What a reader must know before relying on the numbers, from the summary alone.

Fatal: something went wrong that should not. The rest limits what can be said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specstack_loadtest.words import signed_ms

Kind = Literal[
    "run", "errors", "server", "client", "outputs", "baseline", "cache", "repeats", "tokens"
]
SAME_SERVER = ("model_path", "version", "dtype", "plan_hash")
"""What all runs of a side must have been served with: they are taken together."""


@dataclass(frozen=True)
class Problem:
    """One of them."""

    kind: Kind
    fatal: bool
    text: str

    def as_data(self) -> dict[str, Any]:
        """The form in summary.json."""
        return {"kind": self.kind, "fatal": self.fatal, "text": self.text}


def problems_of(summary: Mapping[str, Any]) -> list[Problem]:
    """All of them, fatal ones first."""
    found = [
        *_runs(summary),
        *_errors(summary),
        *_warmups(summary),
        *_servers(summary),
        *_client(summary),
        *_outputs(summary),
        *_baseline(summary),
        *_caches(summary),
        *_repeats(summary),
        *_tokens(summary),
    ]
    return sorted(found, key=lambda problem: not problem.fatal)


def _runs(summary: Mapping[str, Any]) -> Iterator[Problem]:
    there = {(run["side"], run["repeat"]): run for run in summary["runs"]}
    for side in summary["sides"]:
        for repeat in range(summary["repeats"]):
            name = f"{side}, repeat {repeat + 1}"
            run = there.get((side, repeat))
            if run is None:
                yield Problem("run", True, f"{name}: there is no such run; it counts nowhere.")
            elif not run["complete"]:
                reason = f" ({run['reason']})" if run["reason"] else ""
                yield Problem(
                    "run",
                    True,
                    f"{name}: the run ended early{reason}, after {run['seconds']:.0f} s. What was"
                    " measured until then counts; phases after it do not.",
                )


def _errors(summary: Mapping[str, Any]) -> Iterator[Problem]:
    for result in summary["results"]:
        requests = result["requests"]
        if requests["failed"]:
            kinds = ", ".join(f"{kind}: {num}" for kind, num in requests["errors"].items())
            yield Problem(
                "errors",
                True,
                f"{_where(summary, result)}: {requests['failed']} of {requests['measured']}"
                f" requests failed ({kinds}). Latencies are of the others.",
            )


def _warmups(summary: Mapping[str, Any]) -> Iterator[Problem]:
    """Failures of whole runs that no result counts: of the warm-up, or of turns after the end."""
    for run in summary["runs"]:
        counted = sum(
            part["failed"]
            for result in summary["results"]
            for part in result["parts"]
            if (result["side"], part["repeat"]) == (run["side"], run["repeat"])
        )
        if run["complete"] and run["failed"] > counted:
            num = run["failed"] - counted
            yield Problem(
                "errors",
                True,
                f"{run['side']}, repeat {run['repeat'] + 1}: {num}"
                f" request{'s' if num > 1 else ''} outside the measured part failed.",
            )


def _servers(summary: Mapping[str, Any]) -> Iterator[Problem]:
    """Sides whose runs were of different servers."""
    for side in summary["sides"]:
        servers = [run["server"] for run in summary["runs"] if run["side"] == side]
        told = [one for one in servers if any(key in one for key in SAME_SERVER)]
        differing = {
            key: values
            for key in SAME_SERVER
            if len(values := dict.fromkeys(str(one.get(key, "none")) for one in told)) > 1
        }
        if differing:
            found = "; ".join(f"{key} {' and '.join(v)}" for key, v in differing.items())
            yield Problem(
                "server",
                True,
                f"{side}: its runs were of different servers ({found}), and are taken together"
                " here.",
            )


def _client(summary: Mapping[str, Any]) -> Iterator[Problem]:
    for result in summary["results"]:
        if result["client"]["saturated"]:
            where = _where(summary, result)
            yield Problem("client", True, f"{where}: {result['client']['sentence']}")


def _outputs(summary: Mapping[str, Any]) -> Iterator[Problem]:
    if summary["outputs"] is None:
        return
    control = summary["outputs"]["control"]
    for side, found in summary["outputs"]["sides"].items():
        if not found["different"]:
            continue
        said = (
            f"{side}: {found['different']} of {found['pairs']} greedy answers differ from"
            f" {summary['baseline']}'s. "
        )
        if control is None or not control["pairs"]:
            said += "There is no second repeat to tell whether the target repeats itself."
        else:
            said += (
                f"{summary['baseline']}'s own repeats differ in {control['different']} of"
                f" {control['pairs']}."
            )
        yield Problem("outputs", found["beyond_control"], said)


def _baseline(summary: Mapping[str, Any]) -> Iterator[Problem]:
    baseline = summary["baseline"]
    if baseline is None:
        yield Problem(
            "baseline",
            False,
            "No baseline was measured: nothing here says whether speculation pays.",
        )
    elif baseline not in {result["side"] for result in summary["results"]}:
        yield Problem(
            "baseline", True, f"{baseline}, the baseline, has no numbers: nothing is compared."
        )


def _caches(summary: Mapping[str, Any]) -> Iterator[Problem]:
    """Runs that may have found their prompts in the prefix cache, put there by a run before."""
    by_url: dict[str, list[Any]] = {}
    for run in summary["runs"]:
        by_url.setdefault(run["server"].get("url", ""), []).append(run)
    for url, runs in by_url.items():
        if url and len(runs) > 1 and not all(run["cache_flushed"] for run in runs):
            sides = " and ".join(dict.fromkeys(run["side"] for run in runs))
            yield Problem(
                "cache",
                False,
                f"{sides}: {len(runs)} runs on one server ({url}), whose prefix cache could not be"
                " emptied before each of them: later ones may have found their prompts there.",
            )


def _repeats(summary: Mapping[str, Any]) -> Iterator[Problem]:
    """Verdicts that one of the repeats contradicts."""
    for found in summary["comparisons"]:
        gains, each = _gains_of_repeats(found)
        sign = {"faster": 1, "slower": -1}.get(found["verdict"], 0)
        if any(sign * gain < 0 for gain in gains):
            yield Problem(
                "repeats",
                False,
                f"{_where(summary, found)}: all repeats together are {found['verdict']} than"
                f" {summary['baseline']}, but not each of them ({each}): more repeats, or"
                " longer ones, would tell.",
            )


def _gains_of_repeats(found: Mapping[str, Any]) -> tuple[list[float], str]:
    """What a verdict is by, of each repeat: above 0 where the side is faster; and in words."""
    if found["by"] == "tokens_per_s":
        ratios = found["ratio_of_repeats"]
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        return [ratio - 1 for ratio in ratios], f"{each} times"
    differences = found["paired"]["e2e_ms"]["difference_of_repeats"]
    each = ", ".join(map(signed_ms, differences))
    return [-difference for difference in differences], f"{each} end to end"


def _tokens(summary: Mapping[str, Any]) -> Iterator[Problem]:
    sides = {
        result["side"]: None
        for result in summary["results"]
        if result["tokens_per_chunk"] in ("estimated", "mixed")
    }
    if sides:
        yield Problem(
            "tokens",
            False,
            f"{', '.join(sides)}: the server does not count the tokens of each chunk; they are"
            " spread evenly over an answer's chunks, which throughput is counted by.",
        )


def _where(summary: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return f"{result['side']}, {summary['phases'][result['phase']]['name']}"
