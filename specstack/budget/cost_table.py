"""`CostTable`: what a round takes on one machine, as frozen data, and `CostKey`, what it holds for.

Letters: R batch sizes, W budgets, C contexts. A table rises along every axis and has a slope; one
that does not is refused, when it is made as when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specstack.budget.monotone import monotone
from specstack.models.heads.errors import sentences

MIN_RISE = 0.03
"""Least rise of the verify time, from the smallest to the largest budget at the largest batch."""

Milliseconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class CostTableError(ValueError):
    """A cost table that cannot be made, read or used here; the text says what to do."""


class CostKey(BaseModel):
    """What times depend on: a table measured with another key says nothing here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    """The CPU's or GPU's own name."""
    model: str
    drafter: str
    """Kind, and form and weights of its heads."""
    engine: str
    """SGLang's version, attention backend, page size, ranks, threads."""
    dtype: str

    @property
    def digest(self) -> str:
        """Names the table: 12 hexadecimal digits of the SHA-256 of all fields."""
        text = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def differences(self, other: CostKey) -> list[str]:
        """One sentence per field in which `other` differs, with both values."""
        return [
            f"{name} is {theirs!r}, here it is {mine!r}"
            for name, mine in self.model_dump().items()
            if (theirs := getattr(other, name)) != mine
        ]


class CostTable(BaseModel):
    """Times of rounds whose trees are full: 1 + budget tokens per request are verified."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    key: CostKey
    num_requests: tuple[Count, ...]
    """Batch sizes, rising from at least 1 [R]."""
    draft_budgets: tuple[Count, ...]
    """Drafts per request, rising from 0 [W]."""
    contexts: tuple[Count, ...]
    """Committed tokens per request, rising [C]."""
    verify_ms: tuple[tuple[tuple[Milliseconds, ...], ...], ...]
    """All of a round's step but drafting [R][W][C]."""
    draft_ms: tuple[tuple[Milliseconds, ...], ...]
    """Drafting [R][W]; 0 at budget 0."""
    num_rounds: Count
    """Rounds that were measured."""
    measured_at: str
    """ISO 8601."""
    command: str
    """What measured it."""

    @model_validator(mode="after")
    def _check(self) -> CostTable:
        problems = [*self._bad_axes()] or [*self._bad_shapes()] or [*self._bad_times()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @classmethod
    def fitted(
        cls,
        *,
        key: CostKey,
        num_requests: tuple[int, ...],
        draft_budgets: tuple[int, ...],
        contexts: tuple[int, ...],
        verify_ms: NDArray[np.float64],
        draft_ms: NDArray[np.float64],
        num_rounds: int,
        command: str,
        measured_at: str | None = None,
    ) -> CostTable:
        """Make a table of noisy times [R, W, C] and [R, W], forced to rise along every axis.

        Raises:
            CostTableError: sizes do not agree, or the times are flat.
        """
        try:
            return cls(
                key=key,
                num_requests=num_requests,
                draft_budgets=draft_budgets,
                contexts=contexts,
                verify_ms=monotone(verify_ms).round(5).tolist(),
                draft_ms=monotone(draft_ms).round(5).tolist(),
                num_rounds=num_rounds,
                measured_at=measured_at or datetime.now(UTC).isoformat(timespec="seconds"),
                command=command,
            )
        except ValidationError as error:
            raise CostTableError("; ".join(sentences(error))) from None

    def _bad_axes(self) -> Iterator[str]:
        for name in ("num_requests", "draft_budgets", "contexts"):
            axis: tuple[int, ...] = getattr(self, name)
            if not axis or any(a >= b for a, b in pairwise(axis)):
                yield f"{name} must hold rising numbers, got {list(axis)}"
        if self.num_requests[:1] == (0,):
            yield "num_requests must begin at 1 or more, got 0"
        if self.draft_budgets[:1] != (0,) or len(self.draft_budgets) < 2:
            yield (
                "draft_budgets must hold 0 and at least one more, got"
                f" {list(self.draft_budgets)}: without plain decoding nothing can be compared"
            )

    def _bad_shapes(self) -> Iterator[str]:
        wanted = (len(self.num_requests), len(self.draft_budgets), len(self.contexts))
        rows = [column for row in self.verify_ms for column in row]
        if (
            len(self.verify_ms) != wanted[0]
            or any(len(row) != wanted[1] for row in self.verify_ms)
            or any(len(column) != wanted[2] for column in rows)
        ):
            yield f"verify_ms must have the shape {wanted} of the axes"
        if len(self.draft_ms) != wanted[0] or any(len(row) != wanted[1] for row in self.draft_ms):
            yield f"draft_ms must have the shape {wanted[:2]} of the axes"

    def _bad_times(self) -> Iterator[str]:
        verify, draft = np.asarray(self.verify_ms), np.asarray(self.draft_ms)
        axes = ("num_requests", "draft_budgets", "contexts")
        for name, times in (("verify_ms", verify), ("draft_ms", draft)):
            for axis, label in enumerate(axes[: times.ndim]):
                if (np.diff(times, axis=axis) < 0).any():
                    yield f"{name} falls along {label}: fit the table again, which forces it"
        if draft[:, 0].any():
            yield "draft_ms must be 0 at budget 0"
        if not verify.all():
            yield "verify_ms must be above 0"
        least, most = verify[-1, 0, 0], verify[-1, -1, 0]
        if most < least * (1 + MIN_RISE):
            yield (
                f"verify_ms is flat: {least:.3f} ms for 1 token per request and {most:.3f} ms for"
                f" {1 + self.draft_budgets[-1]}, at {self.num_requests[-1]} requests. More tokens"
                f" must take at least {MIN_RISE:.0%} longer; other load or noise was measured:"
                " repeat `specstack bench cost` on an idle machine, or with larger budgets"
            )
