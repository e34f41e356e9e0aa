"""Scalars by the YAML 1.2 core schema, positions, and hostile input."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstack_dsl import SpecError
from specstack_dsl.nodes import MAX_DEPTH, parse


def plain(text: str) -> Any:
    node = parse(text, "f.yaml", ".")
    assert node is not None
    return node.plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("y", "y"),
        ("true", True),
        ("FALSE", False),
        ("tRUE", "tRUE"),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("-3", -3),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("1e-4", 1e-4),
        ("1e4", 1e4),
        (".5", 0.5),
        ("1.", 1.0),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("null", None),
        ('""', ""),
        ('"1"', "1"),
        ("=", "="),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    found = plain(f"a: {text}")["a"]
    assert found == value
    assert type(found) is type(value)


def test_an_empty_value_is_null() -> None:
    assert plain("a:\nb: 1") == {"a": None, "b": 1}


def test_keys_are_text_even_when_they_look_like_a_flag() -> None:
    assert plain("on: 1\nno: 2") == {"on": 1, "no": 2}


def test_every_key_and_value_has_its_line_and_column() -> None:
    node = parse("a:\n  b: [1, {c: 2}]\n", "f.yaml", ".")
    assert node is not None
    places = {path: (n.position.line, n.position.column) for path, n in node.walk()}
    assert places == {
        "": (1, 1), "a": (2, 3), "a.b": (2, 6), "a.b.0": (2, 7), "a.b.1": (2, 10),
        "a.b.1.c": (2, 14),
    }  # fmt: skip
    inner = node.value["a"].value["b"]
    assert (inner.key_position.line, inner.key_position.column) == (2, 3)


def test_an_empty_text_has_no_node() -> None:
    assert parse("# only a comment\n", "f.yaml", ".") is None


def test_all_refused_constructs_are_reported_together() -> None:
    with pytest.raises(SpecError) as caught:
        parse("a: &x 1\nb: *x\nc: !!int 3\nd: 1\nd: 2\n", "f.yaml", ".")
    assert [p.position.line for p in caught.value.problems] == [1, 2, 3, 5]


def test_an_alias_bomb_is_refused_before_it_expands() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    start = time.perf_counter()
    with pytest.raises(SpecError, match="anchors and aliases"):
        parse("\n".join(levels), "f.yaml", ".")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("text", ["[" * 20000, "- " * 20000, "{a: " * 20000], ids=["[", "-", "{"])
def test_deep_nesting_is_an_error_not_a_crash(text: str) -> None:
    with pytest.raises(SpecError, match=f"more than {MAX_DEPTH} levels"):
        parse(text, "f.yaml", ".")


def test_a_number_of_many_digits_is_an_error() -> None:
    with pytest.raises(SpecError, match="a number of 5000 characters"):
        parse("a: " + "9" * 5000, "f.yaml", ".")


def test_an_exponent_beyond_floats_is_an_error() -> None:
    with pytest.raises(SpecError, match="1e999 is not a finite number"):
        parse("a: 1e999", "f.yaml", ".")


def test_a_control_character_is_named_with_its_place() -> None:
    with pytest.raises(SpecError) as caught:
        parse("a: 1\nb: \x07", "f.yaml", ".")
    assert str(caught.value) == "f.yaml:2:4: character U+0007 is not allowed in YAML"


@given(st.text(max_size=200))
def test_any_text_gives_a_node_or_a_spec_error(text: str) -> None:
    problems = ()
    try:
        parse(text, "f.yaml", ".")
    except SpecError as error:
        problems = error.problems
    assert all(problem.position.line >= 1 for problem in problems)
