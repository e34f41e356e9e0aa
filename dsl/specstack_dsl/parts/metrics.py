"""What is counted and under which name."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from specstack_dsl.parts.base import Section


class Metrics(Section):
    """Options of the metrics."""

    section = "metrics"
    summary: ClassVar[str] = "Names and detail of the Prometheus metrics."

    prefix: str = Field(
        "specstack",
        pattern=r"^[a-zA-Z][a-zA-Z0-9_]*$",
        description="First word of every metric name",
    )
    per_position: bool = Field(
        True, description="Count proposed and accepted drafts per depth as well"
    )
    trace: str | None = Field(
        None,
        min_length=1,
        description="Folder for a trace of rounds, numbers only, for `specstack simulate`",
    )
    trace_mib: int = Field(64, ge=1, description="Size at which the oldest part of a trace goes")
