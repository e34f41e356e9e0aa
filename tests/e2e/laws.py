"""Whether two lots of sampled outputs may come from one law."""

from __future__ import annotations

from collections import Counter
from typing import Any

from scipy.stats import chi2_contingency


def same_law(a: Counter[Any], b: Counter[Any]) -> float:
    """Return the p-value of a two-sample chi-square; rare outcomes are pooled."""
    common = [key for key in a | b if a[key] + b[key] >= 16]
    rows = [[c[key] for key in common] for c in (a, b)]
    for row, counts in zip(rows, (a, b), strict=True):
        row.append(counts.total() - sum(row) + 1)
    return float(chi2_contingency(rows).pvalue)
