"""The catalogue, and parts that other packages bring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import Field

import specstack_dsl.parts as parts
from specstack_dsl import SpecError, loads
from specstack_dsl.engine_args import ALWAYS_SET, OWNED, REFUSED_WITH_DRAFTS, turns_on
from specstack_dsl.parts import BUILT_IN, CatalogueError, Part, TreePart, build_catalogue
from specstack_dsl.sglang_args import frozen


class Star(TreePart):
    """All drafts at depth one."""

    kind = "star"
    summary = "All drafts are children of the root."
    implementation = "somewhere:StarBuilder"
    needs = frozenset({"drafts"})
    provides = frozenset({"paths", "branches"})

    depth: int = Field(1, ge=1, le=1, description="Always 1")
    points: int = Field(4, ge=1, description="Drafts")

    @property
    def max_depth(self) -> int:
        """The centre is the root."""
        return 1

    @property
    def max_nodes(self) -> int:
        """The points."""
        return self.points


class _EntryPoint:
    name, value, dist = "star", "stars:Star", None

    def __init__(self, part: Any) -> None:
        self.part = part

    def load(self) -> Any:
        if isinstance(self.part, Exception):
            raise self.part
        return self.part


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def with_part(part: Any) -> None:
        points = [_EntryPoint(part)]
        monkeypatch.setattr(parts, "entry_points", lambda group: points)
        parts.catalogue.cache_clear()

    yield with_part
    monkeypatch.undo()
    parts.catalogue.cache_clear()


def test_a_part_of_another_package_is_a_part_like_any_other(install: Any) -> None:
    install(Star)
    pipeline = loads("version: 1\ntarget: org/m\ntree: {kind: star, points: 3}\n")
    assert pipeline.tree.options == {"depth": 1, "points": 3}
    assert [budget for _, budget in pipeline.budget.steps] == [3, 3, 3]


def test_its_mistakes_are_reported_like_any_other(install: Any) -> None:
    install(Star)
    with pytest.raises(SpecError, match="unknown option of tree star: it has depth, points"):
        loads("version: 1\ntarget: org/m\ntree: {kind: star, pionts: 3}\n")


def test_without_the_package_its_kind_is_unknown() -> None:
    with pytest.raises(SpecError, match=r"expected one of chain, static, beam, .*, found 'star'"):
        loads("version: 1\ntarget: org/m\ntree: star\n")


def test_two_parts_with_one_name_are_an_error(install: Any) -> None:
    install(type("Chain", (Star,), {"kind": "chain"}))
    with pytest.raises(CatalogueError, match="two parts are named tree 'chain': one of specstack"):
        loads("version: 1\ntarget: org/m\n")


def test_a_part_that_is_no_part_is_an_error() -> None:
    with pytest.raises(CatalogueError, match="is not a subclass of DrafterPart, TreePart"):
        build_catalogue((("x", Part),))


def test_a_part_that_cannot_be_loaded_is_an_error(install: Any) -> None:
    install(ImportError("no module named stars"))
    with pytest.raises(CatalogueError, match="part 'star' of stars:Star cannot be loaded: no mod"):
        loads("version: 1\ntarget: org/m\n")


@pytest.mark.parametrize("part", BUILT_IN, ids=lambda part: f"{part.section}-{part.kind}")
def test_every_part_describes_itself(part: type[Part]) -> None:
    assert part.summary.endswith(".")
    assert len(part.summary) <= 80
    assert part.__doc__
    assert all(field.description for field in part.model_fields.values())
    assert part.kind == "none" or ":" in part.implementation


def test_arguments_that_are_kept_from_users_exist_in_sglang() -> None:
    _, names = frozen()
    assert {*OWNED, *ALWAYS_SET, *REFUSED_WITH_DRAFTS} <= names


@pytest.mark.parametrize(
    ("name", "value", "on"),
    [
        ("pp_size", 1, False),
        ("pp_size", None, False),
        ("pp_size", 2, True),
        ("enable_lora", True, True),
        ("enable_lora", False, False),
        ("lora_paths", [], False),
        ("lora_paths", ["a"], True),
        ("disaggregation_mode", "null", False),
        ("disaggregation_mode", "decode", True),
    ],
)
def test_a_feature_is_on_when_its_argument_says_so(name: str, value: Any, on: bool) -> None:
    assert turns_on(name, value) is on
