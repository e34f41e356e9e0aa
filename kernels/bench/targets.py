"""What the kernels are to achieve on a GPU, and whether measured times say so."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from harness import NODES, Timing
from results import Bounds, Result

Verdict = Literal["met", "missed", "not measured"]

VERIFY_PARAMETERS, BYTES_PER_PARAMETER = 8.19e9, 2
"""Qwen3-8B, read once in bfloat16: no verify step is faster, which makes a share of it an upper
bound of the share of a real one."""
MAX_OVERHEAD, OVERHEAD_BATCHES = 0.03, (1, 16)
BUILDERS = ("best_prefixes", "best_nodes")
AFTER_BUILDING = ("link_tree", "accept_greedy", "move_kv")
MIN_ATTENTION_SHARE, LONG_CONTEXT = 0.7, 8192
MAX_RATIO, RIVALS = 1.05, ("sglang", "flashinfer")


@dataclass(frozen=True)
class Target:
    """One claim. Missed if any number misses it; met only if every number of it was measured."""

    claim: str
    verdict: Verdict
    number: str
    """The worst, or why there is none."""
    details: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        return asdict(self)


def judge(
    results: Sequence[Result], bounds: Bounds, *, unfinished: Collection[str], is_gpu: bool
) -> list[Target]:
    """All targets.

    Args:
        unfinished: benchmarks that were not run to their end.
    """
    targets = [
        *(_overhead(batch, results, bounds) for batch in OVERHEAD_BATCHES),
        _attention(results, bounds, is_finished="draft_attention" not in unfinished),
        _rivals(results, is_finished=not unfinished),
    ]
    if is_gpu:
        return targets
    return [Target(target.claim, "not measured", "needs a GPU") for target in targets]


def _verdict(*, missed: bool, missing: bool) -> Verdict:
    if missed:
        return "missed"
    return "not measured" if missing else "met"


def _overhead(batch: int, results: Sequence[Result], bounds: Bounds) -> Target:
    """Of every size of tree, and either way to choose its nodes."""
    verify_ms = bounds.copy_ms(int(VERIFY_PARAMETERS * BYTES_PER_PARAMETER))
    claim = (
        f"B{batch}: building a tree, greedy acceptance and moving its KV take at most "
        f"{MAX_OVERHEAD:.0%} of a Qwen3-8B verify step (of its lower bound, {verify_ms:.2f} ms: "
        f"{VERIFY_PARAMETERS:.2e} parameters x {BYTES_PER_PARAMETER} bytes at a copy's bandwidth)"
    )
    shares, details, is_missing = [], [], False
    for nodes, builder in product(NODES, BUILDERS):
        found = {op: _time_of(op, batch, nodes, results) for op in (builder, *AFTER_BUILDING)}
        absent = [op for op, timing in found.items() if timing is None]
        if absent:
            is_missing = True
            details.append(f"N{nodes} with {builder}: no time of {', '.join(absent)}")
            continue
        timings = [timing for timing in found.values() if timing]
        device_ms = sum(timing.ms for timing in timings)
        share, host_ms = device_ms / verify_ms, sum(timing.host_ms for timing in timings)
        shares.append(share)
        details.append(
            f"N{nodes} with {builder}: {device_ms:.4f} ms, {share:.2%}; host {host_ms:.3f} ms"
        )
    worst = f"at most {max(shares):.2%}" if shares else "no size has all its times"
    missed = any(share > MAX_OVERHEAD for share in shares)
    return Target(claim, _verdict(missed=missed, missing=is_missing), worst, tuple(details))


def _time_of(op: str, batch: int, nodes: int, results: Sequence[Result]) -> Timing | None:
    """At N nodes, or as many drafts with or without the root."""
    for result in results:
        sizes = result.sizes()
        if result.op == op and sizes.get("B") == batch:
            if "N" in sizes and sizes["N"] == nodes:
                return result.timing
            if "N" not in sizes and sizes.get("S") in (nodes - 1, nodes):
                return result.timing
    return None


def _attention(results: Sequence[Result], bounds: Bounds, *, is_finished: bool) -> Target:
    """Where the matrix products take longer than the bytes, the bandwidth cannot be reached."""
    claim = (
        f"draft_attention reads at {MIN_ATTENTION_SHARE:.0%} or more of a copy's bandwidth behind "
        f"{LONG_CONTEXT} and more tokens, where bytes bound it"
    )
    shares, details, is_missing = [], [], not is_finished
    for result in results:
        if result.op != "draft_attention" or result.sizes()["L"] < LONG_CONTEXT:
            continue
        of_copy, of_bound = result.share_of_copy(bounds), result.share_of_bound(bounds)
        if of_copy is None or of_bound is None:
            is_missing = True
            details.append(f"{result.shape}: {result.error}")
        elif bounds.matmul_ms(result.num_flops) > bounds.copy_ms(result.num_bytes):
            details.append(f"{result.shape}: arithmetic bounds it, {of_bound:.1%} of that bound")
        else:
            shares.append(of_copy)
            details.append(f"{result.shape}: {of_copy:.1%}")
    worst = f"at least {min(shares):.1%}" if shares else "no such case has a time"
    missed = any(share < MIN_ATTENTION_SHARE for share in shares)
    verdict = _verdict(missed=missed, missing=is_missing or not shares)
    return Target(claim, verdict, worst, tuple(details))


def _rivals(results: Sequence[Result], *, is_finished: bool) -> Target:
    """Of kernels, by op and name of the rival: each has to have been timed once at least."""
    claim = f"no kernel takes more than {MAX_RATIO} x as long as SGLang's or FlashInfer's beside it"
    pairs = list(_pairs(results))
    ratios = [ratio for *_, ratio in pairs if ratio is not None]
    slower = [
        f"{result.op} {result.shape}: {ratio:.2f} x {rival}"
        for result, rival, ratio in pairs
        if ratio is not None and ratio > MAX_RATIO
    ]
    timed = {(result.op, rival) for result, rival, ratio in pairs if ratio is not None}
    untimed = {
        (result.op, rival): result.error or str(result.rivals[rival])
        for result, rival, ratio in pairs
        if ratio is None and (result.op, rival) not in timed
    }
    details = (*slower, *(f"{op}: no time of {name}: {why}" for (op, name), why in untimed.items()))
    number = "none has a time"
    if ratios:
        number = f"at most {max(ratios):.2f} x, {len(ratios)} of {len(pairs)} pairs measured"
    verdict = _verdict(missed=bool(slower), missing=bool(untimed) or not (ratios and is_finished))
    return Target(claim, verdict, number, details)


def _pairs(results: Sequence[Result]) -> Iterator[tuple[Result, str, float | None]]:
    for result in results:
        for rival in result.rivals:
            if rival.startswith(RIVALS):
                yield result, rival, result.ratio(rival)
