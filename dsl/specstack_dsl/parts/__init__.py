"""The catalogue: every kind of every section, third-party parts included.

A third party adds parts through the entry-point group `specstack.parts`: each entry point names a
subclass of one of the part contracts. Two parts of one section with one name are an error.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from specstack_dsl.parts.autoregressive import Autoregressive
from specstack_dsl.parts.base import BudgetPart, DrafterPart, Part, Section, TreePart, VerifyPart
from specstack_dsl.parts.beam import Beam
from specstack_dsl.parts.best_first import BestFirst
from specstack_dsl.parts.block import Block
from specstack_dsl.parts.block_verification import BlockVerification
from specstack_dsl.parts.chain import Chain
from specstack_dsl.parts.ema import Ema
from specstack_dsl.parts.engine import Engine
from specstack_dsl.parts.expand import Expand
from specstack_dsl.parts.fixed import Fixed
from specstack_dsl.parts.goodput import Goodput
from specstack_dsl.parts.greedy import Greedy
from specstack_dsl.parts.head import HeadPart
from specstack_dsl.parts.merge import Merge
from specstack_dsl.parts.metrics import Metrics
from specstack_dsl.parts.ngram import Ngram
from specstack_dsl.parts.path_conditional import PathConditional
from specstack_dsl.parts.plain import NoDrafter
from specstack_dsl.parts.rejection import Rejection
from specstack_dsl.parts.sample_and_walk import SampleAndWalk
from specstack_dsl.parts.slo import Slo
from specstack_dsl.parts.static import Static
from specstack_dsl.parts.table import Row, Table
from specstack_dsl.parts.target import Target
from specstack_dsl.parts.typical import Typical

__all__ = [
    "BUILT_IN",
    "CONTRACTS",
    "ENTRY_POINT_GROUP",
    "SINGLE",
    "BudgetPart",
    "CatalogueError",
    "DrafterPart",
    "Engine",
    "Fixed",
    "HeadPart",
    "Merge",
    "Metrics",
    "Part",
    "Row",
    "Section",
    "Table",
    "Target",
    "TreePart",
    "VerifyPart",
    "build_catalogue",
    "catalogue",
]

ENTRY_POINT_GROUP = "specstack.parts"

SINGLE: dict[str, type[Section]] = {"target": Target, "engine": Engine, "metrics": Metrics}
"""Sections without a choice of kinds."""

CONTRACTS: dict[str, type[Part]] = {
    "drafter": DrafterPart,
    "tree": TreePart,
    "verify": VerifyPart,
    "budget": BudgetPart,
}
"""Sections with a choice of kinds, in pipeline order."""

BUILT_IN: tuple[type[Part], ...] = (
    Ngram,
    Autoregressive,
    Block,
    Merge,
    NoDrafter,
    Chain,
    Static,
    Beam,
    Expand,
    BestFirst,
    PathConditional,
    Greedy,
    SampleAndWalk,
    Rejection,
    BlockVerification,
    Typical,
    Fixed,
    Table,
    Ema,
    Goodput,
    Slo,
)


class CatalogueError(ValueError):
    """The parts of this installation contradict each other or cannot be loaded."""


Catalogue = dict[str, dict[str, type[Part]]]


def build_catalogue(parts: tuple[tuple[str, type[Part]], ...]) -> Catalogue:
    """Return {section: {kind: part}} of (provider, part); raises CatalogueError."""
    found: Catalogue = {section: {} for section in CONTRACTS}
    owners: dict[tuple[str, str], str] = {}
    for provider, part in parts:
        contract = CONTRACTS.get(getattr(part, "section", ""))
        if contract is None or not issubclass(part, contract):
            contracts = ", ".join(contract.__name__ for contract in CONTRACTS.values())
            raise CatalogueError(f"part {part!r} of {provider} is not a subclass of {contracts}")
        key = (part.section, part.kind)
        if key in owners:
            raise CatalogueError(
                f"two parts are named {part.section} {part.kind!r}:"
                f" one of {owners[key]}, one of {provider}; uninstall one of them"
            )
        owners[key] = provider
        found[part.section][part.kind] = part
    return found


@cache
def catalogue() -> Catalogue:
    """Return the parts of this installation."""
    built_in = tuple(("specstack", part) for part in BUILT_IN)
    third_party = tuple(map(_load, entry_points(group=ENTRY_POINT_GROUP)))
    return build_catalogue(built_in + third_party)


def _load(point: EntryPoint) -> tuple[str, type[Part]]:
    provider = point.dist.name if point.dist else point.value
    try:
        return provider, point.load()
    except (ImportError, AttributeError) as error:
        raise CatalogueError(
            f"part {point.name!r} of {provider} cannot be loaded: {error}"
        ) from error
