"""The contract of a part: a frozen model of its options, and what it says about itself.

A part of the catalogue is one subclass of `DrafterPart`, `TreePart`, `VerifyPart` or `BudgetPart`.
Its options become the keyword arguments of `implementation`; a drafter gets `max_depth`, the depth
of the tree, on top.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

MAX_DRAFT_BUDGET = 1023
"""Largest number of drafts per request and round: a tree has at most 1024 nodes."""

DraftBudget = Annotated[int, Field(ge=0, le=MAX_DRAFT_BUDGET)]
MinSurvival = Annotated[float, Field(ge=0, lt=1, strict=False)]


def _auto_or_positive(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise PydanticCustomError("auto_or_positive", "expected auto or an integer of at least 1")


Auto = Annotated[
    int | Literal["auto"],
    BeforeValidator(_auto_or_positive),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}),
]
"""A positive integer, or `auto`: left to planning, which says what it took and why."""


class Section(BaseModel):
    """Options of one section of a pipeline."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    section: ClassVar[str]
    summary: ClassVar[str]
    """One line for the catalogue."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What earlier sections must provide."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """What later sections may rely on."""


class Part(Section):
    """One kind of a section."""

    kind: ClassVar[str]
    implementation: ClassVar[str]
    """`module:Class`; empty for a part without one."""
    nested: ClassVar[str | None] = None
    """Option that is a list of parts of the same section."""
    inner: ClassVar[str | None] = None
    """Option that is one part of the same section, or nothing."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the implementation, as plain data."""
        return self.model_dump(mode="json")

    @property
    def provided(self) -> frozenset[str]:
        """What these options let later sections rely on."""
        return self.provides


class DrafterPart(Part):
    """What proposes tokens."""

    section = "drafter"

    @property
    def members(self) -> tuple[DrafterPart, ...] | None:
        """The drafters that this one is made of; None: it proposes by itself."""
        return None


class TreePart(Part):
    """What chooses the nodes that the target verifies."""

    section = "tree"

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """Deepest node of any tree."""

    @property
    def search(self) -> dict[str, Any]:
        """Which paths a head expands for it, `specstack.drafters.search.make_search`'s arguments.

        Empty: the best ones, as many as the budget.
        """
        return {}

    @property
    @abstractmethod
    def max_nodes(self) -> int | None:
        """Most nodes a tree of these options can have, root excluded; None: no limit."""


class VerifyPart(Part):
    """What accepts a path of the tree."""

    section = "verify"


class Fallback(BaseModel):
    """When drafting is turned off because acceptance collapsed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    accept_length: float = Field(
        default=1.05,
        ge=1,
        strict=False,
        description="Least mean of tokens per drafting request",
    )
    rounds: int = Field(
        default=200, ge=0, description="Last rounds that drafted, which the mean is over; 0: never"
    )


class BudgetPart(Part):
    """What decides how many drafts a round may verify."""

    section = "budget"
    inner = "shadow"
    around: ClassVar[tuple[str, ...]] = ("fallback", "shadow")
    """Options of what runs around the policy: the implementation does not get them."""

    fallback: Fallback = Field(
        default=Fallback(), description="When collapsed acceptance turns drafting off"
    )
    shadow: Annotated[SerializeAsAny[BudgetPart] | None, WithJsonSchema({"type": "null"})] = Field(
        default=None, description="A second budget that decides every round, but does not act"
    )

    @field_validator("shadow")
    @classmethod
    def _only_watches(cls, shadow: BudgetPart | None) -> BudgetPart | None:
        if shadow is not None and (stated := shadow.model_fields_set & set(cls.around)):
            raise ValueError(f"a shadow only watches: remove its {' and '.join(sorted(stated))}")
        return shadow

    @property
    def options(self) -> dict[str, Any]:
        """Without what runs around the policy."""
        return {k: v for k, v in super().options.items() if k not in self.around}

    @property
    def draft_budgets(self) -> tuple[int, ...]:
        """Every budget that it may choose."""
        return tuple(budget for _, budget in self.steps)

    @property
    def prices_drafts(self) -> bool:
        """Whether it may set a price that nobody stated."""
        return False

    @property
    @abstractmethod
    def steps(self) -> tuple[tuple[int | None, int], ...]:
        """(largest batch, largest draft budget at such batches); None: batches of any size.

        Batches beyond the last step are decoded plainly.
        """
