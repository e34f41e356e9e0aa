"""Scenario files: text to `Scenario`, or every problem at its place (`SpecError`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from specstack_dsl.errors import Position, Problem, SpecError, did_you_mean, in_file_order
from specstack_dsl.messages import descriptions, found, message, nearest
from specstack_dsl.nodes import Node, parse
from specstack_loadtest.scenario import SHIPPED, Closed, Gamma, Poisson, Scenario, Trace
from specstack_loadtest.scenario_rules import RULES

ENDINGS = (".yaml", ".yml")
ARRIVALS: dict[str, type[BaseModel]] = {
    "closed": Closed,
    "poisson": Poisson,
    "gamma": Gamma,
    "trace": Trace,
}


def shipped_scenarios() -> dict[str, Path]:
    """The files of the scenarios that come with the package, by name."""
    return {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Read and check a scenario: a shipped name, or a file whose name ends in .yaml.

    Raises:
        SpecError: there is none, or it is wrong, files that it names included; with every problem.
    """
    file = _file_of(name_or_path)
    root = _root_of(file)
    positions = {path: node.position for path, node in root.walk()}
    scenario = _typed(root, file, positions)
    problems = list(_broken_rules(scenario, positions))
    if problems:
        raise SpecError(in_file_order(problems))
    return scenario


def _file_of(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix in ENDINGS or len(path.parts) != 1:
        return path
    name, shipped = str(name_or_path), shipped_scenarios()
    if name not in shipped:
        text = f"no shipped scenario: expected one of {', '.join(shipped)}, or a file of which the"
        hint = f" name ends in {ENDINGS[0]}{did_you_mean(name, shipped)}"
        raise SpecError([Problem("", text + hint, Position(name), "source")])
    return shipped[name]


def _root_of(file: Path) -> Node:
    """The mapping that a file holds."""
    start = Position(str(file), 1, 1)
    try:
        text = file.read_text("utf-8-sig")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise _source_error(f"cannot read the file: {reason}", Position(str(file))) from None
    except UnicodeDecodeError as error:
        raise _source_error(f"not UTF-8 text: {error.reason}", Position(str(file))) from None
    root = parse(text, str(file), str(file.parent))
    if root is None or root.value is None:
        raise _source_error("empty: a scenario has version, arrivals, workload and stop", start)
    if not isinstance(root.value, dict):
        raise _source_error(f"a scenario is a mapping, found {found(root.plain)}", root.position)
    return root


def _source_error(text: str, position: Position) -> SpecError:
    return SpecError([Problem("", text, position, "source")])


def _typed(root: Node, file: Path, positions: Mapping[str, Position]) -> Scenario:
    data = {"name": file.stem, **root.plain}
    errors: list[Any] = []
    if "folder" in data:  # where a file lies is not its own to say
        errors.append({"type": "extra_forbidden", "loc": ("folder",), "input": data["folder"]})
    try:
        scenario = Scenario.model_validate({**data, "folder": str(file.parent)})
    except ValidationError as error:
        errors += error.errors(include_url=False)
    if errors:
        keys = {path: node.key_position or node.position for path, node in root.walk()}
        raise SpecError(in_file_order(_problems(errors, positions, keys)))
    return scenario


def _problems(
    errors: list[Any], positions: Mapping[str, Position], keys: Mapping[str, Position]
) -> Iterator[Problem]:
    for error in errors:
        kind = error["type"]
        if kind == "too_short" and error["input"]:
            continue  # pydantic counts sound items only; the unsound ones are reported themselves
        location, text = _in_words(error)
        path = ".".join(map(str, location))
        if kind != "missing":
            path = _written(path, positions)
        places = keys if kind == "extra_forbidden" else positions
        yield Problem(path, text, nearest(path, places), "types")


def _in_words(error: Any) -> tuple[tuple[Any, ...], str]:
    """The location of a pydantic error in the text, and its message."""
    location, context = error["loc"], error.get("ctx", {})
    if error["type"] == "union_tag_not_found":
        return location, f"missing kind: one of {', '.join(ARRIVALS)}"
    if error["type"] == "union_tag_invalid":
        choice = {"expected": context["expected_tags"]}
        error = {**error, "type": "literal_error", "input": context["tag"], "ctx": choice}
        return (*location, "kind"), message(error, {}, "", {})
    if location[0] == "arrivals" and len(location) > 1:  # the kind stands between
        kind, *inside = location[1:]
        known = descriptions(ARRIVALS[kind], tuple(inside[:-1]))
        error = {**error, "loc": tuple(inside)}
        return ("arrivals", *inside), message(error, known, f"arrivals {kind}", ARRIVALS)
    known = descriptions(Scenario, location[:-1])
    known.pop("folder", None)
    owners = [part for part in location[:-1] if isinstance(part, str)]
    return location, message(error, known, owners[-1] if owners else "a scenario", {})


def _written(path: str, positions: Mapping[str, Position]) -> str:
    """The path of the innermost value around a location: a number may stand for a mapping."""
    while path not in positions:
        path = path.rpartition(".")[0]
    return path


def _broken_rules(scenario: Scenario, positions: Mapping[str, Position]) -> Iterator[Problem]:
    for rule in RULES:
        for path, text in rule(scenario):
            yield Problem(path, text, nearest(path, positions), rule.__name__)
