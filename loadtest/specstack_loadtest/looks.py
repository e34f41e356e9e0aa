"""Names and colours that page and plots have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Summary = Mapping[str, Any]
"""What `summary.summarise` gives."""

BASELINE_COLOR = "#8a939e"
COLORS = ("#2f87d0", "#e0861a", "#1f9d78", "#d5573b", "#a667c2", "#35a7bd", "#b08a1e", "#5a6fd6")
"""Mid tones, which stand out from white and from black."""
MEASURES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "gap between chunks",
    "e2e_ms": "end to end",
}


def colors_of(summary: Summary) -> dict[str, str]:
    """The colour of each side; the baseline is grey."""
    others = [side for side in summary["sides"] if side != summary["baseline"]]
    found = {side: COLORS[i % len(COLORS)] for i, side in enumerate(others)}
    if summary["baseline"] is not None:
        found[summary["baseline"]] = BASELINE_COLOR
    return {side: found[side] for side in summary["sides"]}
