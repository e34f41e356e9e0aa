"""From timed rounds to a `CostTable`: medians per cell, what is missing filled, forced to rise.

Letters: R batch sizes, W budgets, C contexts. A cell is measured by `MIN_SAMPLES` rounds; a batch
size counts at a context where plain decoding and one more budget are measured. Its other budgets
lie on lines between the measured ones, beyond them on their common slope. A context that it lacks
is taken from the nearest one that it has, and what the change of context costs per request at the
batch sizes that have both (attention reads every request's own keys and values).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specstack.budget.cost_table import CostKey, CostTable, CostTableError
from specstack.budget.monotone import isotonic

MIN_SAMPLES = 3
CONTEXT_EDGES = (512, 4096, 32768)
"""Upper edges, in tokens, of the bins of context length; a bin stands at its samples' median."""

Floats = NDArray[np.float64]


class Sample(NamedTuple):
    """One timed round."""

    num_requests: int
    draft_budget: int
    num_tokens: float
    """Verified per request on average, root included (and padding, where the engine pads)."""
    context: float
    """Committed tokens per request on average."""
    draft_ms: float
    """0 counts for plain decoding, whatever the host did."""
    step_ms: float


class _Cell(NamedTuple):
    """Medians of a cell's rounds."""

    drafts: float
    """Verified per request."""
    verify_ms: float
    draft_ms: float


def fit_table(
    samples: Iterable[Sample], key: CostKey, command: str, measured_at: str | None = None
) -> CostTable:
    """Fit a table to timed rounds.

    Raises:
        CostTableError: no batch size has two budgets (0 among them), or the times are flat.
    """
    known = list(samples)
    bins, slices = _measured(known)
    if not slices:
        raise _nothing(known)
    num_requests = tuple(sorted({requests for requests, _ in slices}))
    budgets = tuple(sorted({budget for cells in slices.values() for budget in cells}))
    places = sorted({place for _, place in slices})
    return CostTable.fitted(
        key=key,
        num_requests=num_requests,
        draft_budgets=budgets,
        contexts=tuple(bins[place] for place in places),
        verify_ms=_verify(slices, num_requests, budgets, places),
        draft_ms=_draft(slices, num_requests, budgets),
        num_rounds=len(known),
        command=command,
        measured_at=measured_at,
    )


def _measured(
    samples: list[Sample],
) -> tuple[dict[int, int], dict[tuple[int, int], dict[int, _Cell]]]:
    """Contexts of the bins, and cells by (batch size, bin), then by budget."""
    groups: dict[tuple[int, int], dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        place = int(np.searchsorted(CONTEXT_EDGES, sample.context))
        groups[sample.num_requests, place][sample.draft_budget].append(sample)
    slices = {}
    contexts: dict[int, list[float]] = defaultdict(list)
    for name, budgets in groups.items():
        cells = {
            budget: _cell(rounds, drafts=budget > 0)
            for budget, rounds in budgets.items()
            if len(rounds) >= MIN_SAMPLES
        }
        if 0 in cells and len(cells) > 1:
            slices[name] = cells
            contexts[name[1]] += [s.context for budget in cells for s in budgets[budget]]
    return {place: ceil(np.median(found)) for place, found in contexts.items()}, slices


def _cell(rounds: list[Sample], *, drafts: bool) -> _Cell:
    draft = [sample.draft_ms if drafts else 0.0 for sample in rounds]
    verify = [sample.step_ms - ms for sample, ms in zip(rounds, draft, strict=True)]
    tokens = [sample.num_tokens for sample in rounds]
    return _Cell(
        float(np.median(tokens)) - 1.0 if drafts else 0.0,
        float(np.median(verify)),
        float(np.median(draft)),
    )


def _nothing(samples: list[Sample]) -> CostTableError:
    found = sorted({(sample.num_requests, sample.draft_budget) for sample in samples})
    listed = ", ".join(f"{requests}x{budget}" for requests, budget in found[:12])
    return CostTableError(
        f"a cost table needs {MIN_SAMPLES} timed rounds each of plain decoding (budget 0) and of"
        f" one more budget, at one batch size and similar contexts; found {len(samples)} rounds"
        + (f", of requests x budget {listed}" if found else "")
        + ": force budgets with `specstack bench cost`"
    )


def _verify(
    slices: Mapping[tuple[int, int], Mapping[int, _Cell]],
    num_requests: tuple[int, ...],
    budgets: tuple[int, ...],
    places: list[int],
) -> Floats:
    """Verify times [R, W, C], complete."""
    times = np.full((len(num_requests), len(budgets), len(places)), np.nan)
    for (requests, place), cells in slices.items():
        row, column = num_requests.index(requests), places.index(place)
        times[row, :, column] = _along_budgets(cells, budgets)
    return _fill_contexts(times, num_requests)


def _fill_contexts(times: Floats, num_requests: tuple[int, ...]) -> Floats:
    """Complete [R, W, C], in which a batch size has all budgets of a context or none."""
    known = np.asarray(~np.isnan(times).any(axis=1))  # [R, C]
    sizes = np.asarray(num_requests, dtype=np.float64)
    filled = times.copy()
    for r, c in np.argwhere(~known).tolist():
        near = min(np.flatnonzero(known[r]).tolist(), key=lambda other: abs(other - c))
        filled[r, :, c] = times[r, :, near]
        rows = np.flatnonzero(known[:, c] & known[:, near])
        if rows.size:
            change = (times[rows, :, c] - times[rows, :, near]) / sizes[rows, None]
            at_size = [np.interp(sizes[r], sizes[rows], column) for column in change.T]
            filled[r, :, c] += sizes[r] * np.asarray(at_size)
            # Noise may take more off a short step than there is.
            filled[r, :, c] = np.maximum(filled[r, :, c], times[r, :, near] / 2)
    return filled


def _along_budgets(cells: Mapping[int, _Cell], budgets: tuple[int, ...]) -> Floats:
    """Verify times of full trees [W], from two or more cells, whose trees may have been smaller."""
    points = sorted(cells.values())
    drafts = np.asarray([cell.drafts for cell in points])
    times = isotonic(np.asarray([cell.verify_ms for cell in points]))
    drafts, first = np.unique(drafts, return_index=True)
    times = np.maximum.accumulate(times[first])
    beyond = np.maximum(np.asarray(budgets) - drafts[-1], 0.0)
    return np.asarray(np.interp(budgets, drafts, times) + beyond * _slope(drafts, times))


def _slope(drafts: Floats, times: Floats) -> float:
    """Least-squares slope of the points that verified drafts; of all where fewer than two did.

    The last two points alone would say anything where they are near each other.
    """
    some = drafts > 0 if (drafts > 0).sum() > 1 else np.ones(len(drafts), dtype=bool)
    spread = drafts[some] - drafts[some].mean()
    if not spread.any():
        return 0.0
    return max(0.0, float(spread @ times[some] / (spread @ spread)))


def _draft(
    slices: Mapping[tuple[int, int], Mapping[int, _Cell]],
    num_requests: tuple[int, ...],
    budgets: tuple[int, ...],
) -> Floats:
    """Draft times [R, W]: medians over contexts; 0 at budget 0."""
    times = np.zeros((len(num_requests), len(budgets)))
    for row, requests in enumerate(num_requests):
        found: dict[int, list[float]] = defaultdict(list)
        for (size, _), cells in slices.items():
            for budget, cell in cells.items() if size == requests else ():
                found[budget].append(cell.draft_ms)
        axis = np.asarray(sorted(set(found) - {0}), dtype=np.float64)
        medians = isotonic(np.asarray([np.median(found[int(budget)]) for budget in axis]))
        times[row, 1:] = _extended_draft(np.asarray(budgets[1:]), axis, medians)
    return times


def _extended_draft(budgets: NDArray[np.int64], axis: Floats, medians: Floats) -> Floats:
    """Draft times of budgets; those beyond the measured ones [N] go on with their slope."""
    slope = _slope(axis, medians) if len(axis) > 1 else 0.0
    beyond = np.maximum(budgets - axis[-1], 0.0)
    return np.asarray(np.interp(budgets, axis, medians) + beyond * slope)
