"""What a reader must know before relying on the numbers, from the summary alone.

Fatal: something went wrong that should not. The rest limits what can be said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specstack_loadtest.words import signed_ms

Kind = Literal["run", "errors", "client", "outputs", "baseline", "cache", "repeats", "tokens"]


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
        if control is None:
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
    seen: dict[str, str] = {}
    for run in summary["runs"]:
        url = run["server"].get("url", "")
        before = seen.setdefault(url, run["side"])
        if url and before != run["side"] and not run["cache_flushed"]:
            yield Problem(
                "cache",
                False,
                f"{before} and {run['side']} are one server ({url}), whose prefix cache could not"
                " be emptied between runs: who ran later may have found its prompts there.",
            )
            return


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
