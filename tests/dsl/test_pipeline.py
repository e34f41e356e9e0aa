"""Defaults, positions, freezing, and reporting everything at once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specstack_dsl import Pipeline, SpecError, loads

HEAD = "version: 1\ntarget: org/model\n"


def test_a_pipeline_of_two_lines_drafts_with_ngrams() -> None:
    pipeline = loads(HEAD)
    kinds = (pipeline.drafter.kind, pipeline.tree.kind, pipeline.verify.kind, pipeline.budget.kind)
    assert kinds == ("ngram", "best_first", "sample_and_walk", "table")


def test_the_default_budget_fits_the_tree() -> None:
    pipeline = loads(HEAD + "tree: {kind: chain, depth: 6}\n")
    assert [budget for _, budget in pipeline.budget.steps] == [6, 6, 4]


def test_without_a_drafter_the_default_budget_is_zero() -> None:
    pipeline = loads(HEAD + "drafter: none\n")
    assert pipeline.budget.steps == ((None, 0),)
    assert not pipeline.speculates


def test_without_a_drafter_a_tree_with_budget_zero_is_plain_decoding() -> None:
    text = HEAD + "drafter: none\ntree: chain\nbudget: {kind: fixed, draft_budget: 0}\n"
    assert not loads(text).speculates


def test_a_pipeline_is_frozen() -> None:
    pipeline = loads(HEAD)
    with pytest.raises(ValidationError):
        pipeline.version = 2
    with pytest.raises(ValidationError):
        pipeline.tree.depth = 2


def test_positions_fall_back_to_what_surrounds_a_value() -> None:
    pipeline = loads(HEAD + "tree: {kind: chain}\n", "f.yaml")
    assert str(pipeline.position("tree.depth")) == "f.yaml:3:7"
    assert pipeline.position("budget.draft_budget").line == 1
    assert pipeline.states("tree.kind")
    assert not pipeline.states("tree.depth")


def test_all_problems_come_at_once_and_in_file_order() -> None:
    text = (
        "version: 2\n"
        "tree: {kind: chain, depth: 0}\n"
        "engine: {port: x, args: {pp_sise: 2, pp_size: 2}}\n"
        "budget: {kind: fixed}\n"
        "foo: 1\n"
    )
    with pytest.raises(SpecError) as caught:
        loads(text)
    found = [(p.position.line, p.path) for p in caught.value.problems]
    assert found == [
        (1, "target"), (1, "version"), (2, "tree.depth"), (3, "engine.port"),
        (4, "budget.draft_budget"), (5, "foo"),
    ]  # fmt: skip


def test_rules_run_over_the_sections_that_are_sound() -> None:
    text = HEAD + "tree: {kind: chain, depth: x}\nengine: {args: {pp_size: 2, foo: 1}}\n"
    with pytest.raises(SpecError) as caught:
        loads(text)
    assert [p.path for p in caught.value.problems] == [
        "tree.depth", "engine.args.pp_size", "engine.args.foo",
    ]  # fmt: skip


def test_a_broken_section_does_not_blame_the_default_that_stands_in_for_it() -> None:
    text = HEAD + "tree: {kind: chain, depth: x}\nbudget: {kind: fixed, draft_budget: 900}\n"
    with pytest.raises(SpecError) as caught:
        loads(text)
    assert [p.path for p in caught.value.problems] == ["tree.depth"]


def test_a_tree_of_width_one_is_as_long_as_it_is_deep() -> None:
    text = (
        HEAD
        + "tree: {kind: best_first, depth: 5, width: 1}\nbudget: {kind: fixed, draft_budget: %d}\n"
    )
    assert loads(text % 5).tree.max_nodes == 5
    with pytest.raises(SpecError, match="6 drafts do not fit"):
        loads(text % 6)


def test_a_rule_about_rows_at_one_budget() -> None:
    with pytest.raises(SpecError, match=r"budget\.draft_budget: 9 drafts do not fit tree chain"):
        loads(HEAD + "tree: chain\nbudget: {kind: fixed, draft_budget: 9}\n")


def test_sglang_arguments_that_turn_a_feature_off_are_fine_with_a_drafter() -> None:
    args = "{pp_size: 1, enable_lora: false, disaggregation_mode: 'null', lora_paths: null}"
    loads(HEAD + f"engine: {{args: {args}}}\n")


def test_features_that_exclude_drafting_are_fine_without_a_drafter() -> None:
    loads(HEAD + "drafter: none\nengine: {attention_backend: torch_native, args: {pp_size: 2}}\n")


def test_the_pipeline_is_the_one_of_the_package() -> None:
    assert isinstance(loads(HEAD), Pipeline)
