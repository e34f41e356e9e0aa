"""JSON Schema of the language, for editors: `specstack schema` prints it.

The schema knows kinds, options and ranges. Cross-part rules, `--set` and the values of variables
are for `specstack check`.
"""

from __future__ import annotations

from typing import Any

from specstack_dsl.parts import CONTRACTS, SINGLE, BudgetPart, Part, Section, catalogue
from specstack_dsl.sections import LANGUAGE_VERSION, SECTIONS
from specstack_dsl.source import NAMED_SECTIONS

_VARIABLE = {"type": "string", "pattern": r"\$\{"}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by what they name, and drop the titles that pydantic makes up."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    made_up = isinstance(schema.get("title"), str)
    return {
        key: _inline(value, definitions)
        for key, value in schema.items()
        if key != "$defs" and not (key == "title" and made_up)
    }


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    """Let `${VAR}` stand where the schema lists words."""
    if "enum" not in schema:
        return schema
    choices = {"type": "string", "enum": schema["enum"]}
    rest = {key: value for key, value in schema.items() if key not in ("enum", "type")}
    return {**rest, "anyOf": [choices, _VARIABLE]}


def _section_schema(section: type[Section], *, inside: bool = False) -> dict[str, Any]:
    """Schema of a section; `inside`: of a part inside another part of its section."""
    raw = section.model_json_schema()
    schema: dict[str, Any] = _inline(raw, raw.get("$defs", {}))
    options = {name: _or_variable(option) for name, option in schema["properties"].items()} if (
        "properties" in schema
    ) else {}  # fmt: skip
    schema["description"] = section.summary
    schema["properties"] = options
    if issubclass(section, Part):
        kind = {"const": section.kind, "description": section.summary}
        schema["properties"] = {"kind": kind, **options}
        if section.nested is not None:
            options[section.nested]["items"] = _member(section)
        if section.inner is not None and not inside:
            forms = [{"type": "null"}, *_member(section)["anyOf"]]
            description = options[section.inner]["description"]
            schema["properties"][section.inner] = {"anyOf": forms, "description": description}
        if inside and issubclass(section, BudgetPart):
            for option in section.around:
                del schema["properties"][option]
    # A file that extends another may leave any option to its parent.
    schema.pop("required", None)
    return schema


def _member(part: type[Part]) -> dict[str, Any]:
    """Schema of a part inside `part`: another one of its section that has no parts inside."""
    others = {
        k: p for k, p in catalogue()[part.section].items() if p.implementation and p.nested is None
    }
    whole = [
        {**_section_schema(other, inside=True), "required": ["kind"]} for other in others.values()
    ]
    return {"anyOf": [{"enum": list(others)}, _VARIABLE, *whole]}


def _names(section: str) -> dict[str, Any]:
    if section not in CONTRACTS:
        return {"type": "string", "description": "A model, by name"}
    kinds = list(catalogue()[section])
    return {"anyOf": [{"enum": kinds}, _VARIABLE]}


def _choice(section: str) -> dict[str, Any]:
    """Schema of one section: its name form, and one object per kind."""
    if section in SINGLE:
        schemas = [_section_schema(SINGLE[section])]
    else:
        schemas = [_section_schema(part) for part in catalogue()[section].values()]
    forms = [_names(section), *schemas] if section in NAMED_SECTIONS else schemas
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _when_complete() -> dict[str, Any]:
    """What a file without `extends` must give."""
    needed = {name: {"required": ["kind"]} for name in CONTRACTS} | {
        "target": {"required": ["model"]}
    }
    return {
        "required": ["version", "target"],
        "properties": {
            name: {"if": {"type": "object"}, "then": must} for name, must in needed.items()
        },
    }


def json_schema() -> dict[str, Any]:
    """Return the schema of a pipeline file, with the parts of this installation."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "specstack pipeline",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "version": {"const": LANGUAGE_VERSION, "description": "Version of the language"},
            "extends": {"type": "string", "description": "File whose values are the defaults"},
            **{section: _choice(section) for section in SECTIONS},
        },
        "if": {"required": ["extends"]},
        "else": _when_complete(),
    }
