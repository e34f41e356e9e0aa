"""How numbers and lists are written for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DASH = "\u2013"
Estimate = Mapping[str, float | None]
"""Its value, and the low and the high end of its interval."""


def amount(value: float | None) -> str:
    """Three digits; no more than that is known of anything here."""
    if value is None:
        return DASH
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size == 0:
        return "0"
    if size < 0.001:
        return f"{value:.1e}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"


def milliseconds(value: float | None) -> str:
    """A length of time, in seconds from 1 s on."""
    if value is None:
        return DASH
    return f"{amount(value / 1000)} s" if abs(value) >= 1000 else f"{amount(value)} ms"


def signed_ms(value: float | None) -> str:
    """A difference of times."""
    return DASH if value is None else _signed(value) + milliseconds(value)


def percent(value: float | None) -> str:
    """A share."""
    return DASH if value is None else f"{_hundredfold(value)} %"


def _hundredfold(value: float) -> str:
    size = abs(100 * value)
    return f"{100 * value:.{0 if size >= 10 or size == 0 else 1 if size >= 1 else 2}f}"


def _signed(value: float) -> str:
    return "+" if value > 0 else ""


def load_unit(phases: Sequence[Mapping[str, Any]]) -> str:
    """What the loads of several phases count, as their names say."""
    return str(phases[-1]["name"]).rpartition(" ")[2]


def interval(estimate: Estimate, form: str = "amount") -> str:
    """low to high, in one unit; nothing where there is none.

    Args:
        form: amount, ms, signed_ms or percent.
    """
    low, high = estimate["low"], estimate["high"]
    if low is None or high is None:
        return ""
    if form == "percent":
        return f"{_hundredfold(low)} to {_hundredfold(high)} %"
    if form == "amount":
        return f"{amount(low)} to {amount(high)}"
    in_seconds = max(abs(low), abs(high)) >= 1000
    scale, unit = (1000, "s") if in_seconds else (1, "ms")
    signs = (_signed(low), _signed(high)) if form == "signed_ms" else ("", "")
    return f"{signs[0]}{amount(low / scale)} to {signs[1]}{amount(high / scale)} {unit}"


def with_interval(estimate: Estimate) -> str:
    """An amount and its interval."""
    bounds = interval(estimate)
    return amount(estimate["value"]) + (f" ({bounds})" if bounds else "")


def difference_of(estimate: Estimate, less: str, more: str) -> str:
    """A difference of times in words, with its interval."""
    value, bounds = estimate["value"], interval(estimate, "signed_ms")
    if value is None:
        return ""
    said = f"{milliseconds(abs(value))} {more if value > 0 else less}"
    return f"{said} ({bounds})" if bounds else said


def listed(words: Sequence[str], last: str = "and") -> str:
    """a, b and c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
