"""The JSON Schema: current, valid, and as strict as the language where it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from specstack_dsl.nodes import parse
from specstack_dsl.schema import json_schema

DSL = Path(__file__).parents[2] / "dsl"
VALIDATOR = jsonschema.Draft202012Validator(json_schema())
HEAD = {"version": 1, "target": "org/model"}


def test_it_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_the_file_is_current() -> None:
    written = json.loads((DSL / "schema.json").read_text("utf-8"))
    assert written == json_schema(), "write it again: specstack schema > dsl/schema.json"


def test_every_option_has_a_description() -> None:
    def options(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        forms = [schema, *schema.get("anyOf", [])]
        return [item for form in forms for item in form.get("properties", {}).items()]

    for section, schema in json_schema()["properties"].items():
        for name, option in options(schema):
            assert option.get("description"), f"{section}.{name}"


TYPE_MISTAKES = sorted((DSL / "invalid").glob("types_*.yaml"), key=lambda file: file.name)
NOT_IN_THE_SCHEMA = {
    "types_min_match_above_max_match": "a relation between two options",
    "types_rows_not_rising": "a relation between two rows",
    "types_target_not_a_model": "checked by code",
    "types_table_without_rows": "rows may come from a parent",
    "types_head_not_a_checkpoint": "checked by code",
    "types_head_without_checkpoint": "it may come from a parent",
    "types_typical_without_lossy": "it may come from a parent",
    "types_paths_child_before_parent": "a relation between two paths",
    "types_paths_twice": "a relation between two paths",
    "types_paths_with_a_gap": "a relation between two paths",
    "types_cost_not_rising": "a relation between two points",
    "types_cost_falling": "a relation between two points",
    "types_cost_without_plain_decoding": "checked by code",
    "types_choices_not_rising": "a relation between two choices",
    "types_choices_without_plain_decoding": "checked by code",
    "types_slo_without_target": "it may come from a parent",
}


@pytest.mark.parametrize("file", TYPE_MISTAKES, ids=lambda file: file.stem)
def test_it_refuses_what_types_refuse(file: Path) -> None:
    node = parse(file.read_text("utf-8"), file.name, ".")
    assert node is not None
    assert VALIDATOR.is_valid(node.plain) == (file.stem in NOT_IN_THE_SCHEMA)


@pytest.mark.parametrize(
    "document",
    [
        {"extends": "parent.yaml"},
        {"extends": "parent.yaml", "tree": {"depth": 4}},
        {"extends": "parent.yaml", "budget": {"kind": "fixed"}},
        {**HEAD, "target": {"model": "org/model", "dtype": "${DTYPE}"}},
        {**HEAD, "tree": "${TREE}"},
        {**HEAD, "engine": {"page_size": 16}},
    ],
)
def test_it_accepts(document: dict[str, Any]) -> None:
    VALIDATOR.validate(document)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"version": 1},
        {**HEAD, "tree": {"depth": 4}},
        {**HEAD, "engine": {"device": "gpu"}},
        {**HEAD, "tree": {"kind": "chain", "width": 2}},
    ],
)
def test_it_refuses(document: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(document)
