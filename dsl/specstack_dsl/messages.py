"""pydantic's errors in the words of the language: what was expected, what was found, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from specstack_dsl.errors import Position, Problem, did_you_mean
from specstack_dsl.parts import catalogue

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def found(value: Any) -> str:
    """Show a value as the reader wrote it, cut to one short line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _choice(error: Mapping[str, Any]) -> str:
    choices = str(error["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
    value = error["input"]
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"expected one of {', '.join(choices)}, found {found(value)}{hint}"


def _unknown(name: str, known: Mapping[str, str], owner: str, others: Mapping[str, Any]) -> str:
    options = f"it has {', '.join(known)}" if known else "it has no options"
    having = [kind for kind, part in others.items() if name in part.model_fields]
    hint = f"; kind {' and '.join(having)} has it" if having else did_you_mean(name, known)
    return f"unknown option of {owner}: {options}{hint}"


def message(
    error: Mapping[str, Any], known: Mapping[str, str], owner: str, others: Mapping[str, Any]
) -> str:
    """Return the text for one pydantic error.

    Args:
        error: as pydantic reports it.
        known: options of the part, with descriptions.
        owner: name of the part.
        others: the kinds of its section.
    """
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    name = str(error["loc"][-1]) if error["loc"] else ""
    if kind == "extra_forbidden":
        return _unknown(name, known, owner, others if len(error["loc"]) == 1 else {})
    if kind == "missing":
        description = known.get(name, "")
        return f"missing ({description})" if description else "missing"
    if kind == "literal_error":
        return _choice(error)
    if kind == "value_error":
        return str(context["error"])
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, found {found(value)}"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        return f"expected {bound}, found {found(value)}"
    if kind == "greater_than":
        return f"expected above {context['gt']:g}, found {found(value)}"
    if kind == "too_short":
        items = "item" if context["min_length"] == 1 else "items"
        return (
            f"expected at least {context['min_length']} {items}, found {context['actual_length']}"
        )
    if kind == "too_long":
        return f"expected at most {context['max_length']} items, found {context['actual_length']}"
    if kind == "string_too_short":
        return "expected text, found an empty one"
    if kind == "string_pattern_mismatch":
        return f"expected text that matches {context['pattern']}, found {found(value)}"
    return f"{error['msg']}, found {found(value)}"


def descriptions(model: type[BaseModel], location: tuple[Any, ...] = ()) -> dict[str, str]:
    """Return {option: description} of the model that a pydantic location lies in."""
    fields = model.model_fields
    for part in location:
        if not isinstance(part, str) or part not in fields:
            continue
        inner = fields[part].annotation
        nested = [a for a in (inner, *getattr(inner, "__args__", ())) if isinstance(a, type)]
        models = [a for a in nested if issubclass(a, BaseModel)]
        fields = models[0].model_fields if models else {}
    return {name: field.description or "" for name, field in fields.items()}


def problems_of(
    error: ValidationError,
    model: type[BaseModel],
    owner: str,
    section: str,
    at: str,
    positions: Mapping[str, Position],
    keys: Mapping[str, Position],
) -> list[Problem]:
    """Return the problems of one section, or of a part of it at the path `at`, in the text."""
    problems = []
    found_all = error.errors(include_url=False)
    for item in found_all:
        location = item["loc"]
        if item["type"] == "too_short" and any(
            len(other["loc"]) > len(location) and other["loc"][: len(location)] == location
            for other in found_all
        ):
            continue  # pydantic counts sound items only; the unsound ones are reported themselves
        path = ".".join([at, *map(str, item["loc"])])
        known = descriptions(model, item["loc"][:-1])
        others = catalogue().get(section, {})
        at_key = item["type"] == "extra_forbidden"
        place = nearest(path, keys if at_key else positions)
        problems.append(Problem(path, message(item, known, owner, others), place, "types"))
    return problems


def nearest(path: str, positions: Mapping[str, Position]) -> Position:
    """Return the place of `path`, or of the innermost value around it that has one."""
    while path not in positions and path:
        path = path.rpartition(".")[0]
    return positions[path]
