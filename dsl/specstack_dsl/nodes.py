"""Text to nodes: YAML 1.2 core scalars with the (line, column) of every key and value.

Stricter than YAML: duplicate keys, anchors, aliases, tags, merge keys (`<<`) and keys that are
not text are errors; so nothing can be written twice, and a short text cannot expand to a long one.
`extends:` does the work of anchors and merge keys. By the 1.2 core schema `on` and `yes` are text,
`010` is ten, `0o10` is eight, `1e-4` is a number and `1_000` is text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from specstack_dsl.errors import Position, Problem, SpecError

MAX_DEPTH = 32
MAX_NUMBER_LENGTH = 64


@dataclass(frozen=True)
class Node:
    """A value with its place. `value` is a scalar, a dict of nodes or a list of nodes."""

    value: Any
    position: Position
    key_position: Position | None = None
    """Where its key stands; None for list items and the root."""

    @property
    def plain(self) -> Any:
        """The value as plain Python data."""
        if isinstance(self.value, dict):
            return {key: child.plain for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain for child in self.value]
        return self.value

    def walk(self, path: str = "") -> Iterator[tuple[str, Node]]:
        """Yield (dotted path, node) for this node and all below it."""
        yield path, self
        children: Iterator[tuple[Any, Node]] = iter(())
        if isinstance(self.value, dict):
            children = iter(self.value.items())
        elif isinstance(self.value, list):
            children = enumerate(self.value)
        for key, child in children:
            yield from child.walk(f"{path}.{key}" if path else str(key))


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema; refuses anchors, aliases and tags."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (PyYAML's own table)

    def __init__(self, text: str, problems: list[tuple[str, Any]]) -> None:
        super().__init__(text)
        self.problems = problems
        self.nesting = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            message = "anchors and aliases are not part of the language: write the value again, or"
            self.problems.append((f"{message} share it with extends", event.start_mark))
        elif event.tag is not None:
            self.problems.append((f"tags are not part of the language: remove {event.tag!r}",
                                  event.start_mark))  # fmt: skip
        if isinstance(event, yaml.AliasEvent):
            self.get_event()  # type: ignore[no-untyped-call]
            mark: Any = event.start_mark
            return yaml.ScalarNode("tag:yaml.org,2002:null", "", mark, mark)
        if self.nesting >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"more than {MAX_DEPTH} levels of nesting", problem_mark=event.start_mark
            )
        self.nesting += 1
        node = super().compose_node(parent, index)
        self.nesting -= 1
        return node


_CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
for _tag, _pattern, _first in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


def _integer(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text, base)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_CONSTRUCT: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _integer,
    "float": _float,
    "str": lambda text: text,
}


@dataclass
class _Builder:
    """Turns PyYAML's nodes into ours and collects what is wrong with them."""

    file: str
    folder: str
    problems: list[Problem] = field(default_factory=list)

    def position(self, mark: Any) -> Position:
        return Position(self.file, mark.line + 1, mark.column + 1, self.folder)

    def report(self, message: str, mark: Any, path: str = "") -> None:
        self.problems.append(Problem(path, message, self.position(mark), "source"))

    def node(self, raw: Any, path: str = "", key_mark: Any = None) -> Node:
        position = self.position(raw.start_mark)
        key_position = self.position(key_mark) if key_mark else None
        if isinstance(raw, yaml.MappingNode):
            return Node(self.mapping(raw, path), position, key_position)
        if isinstance(raw, yaml.SequenceNode):
            items = [self.node(item, f"{path}.{i}") for i, item in enumerate(raw.value)]
            return Node(items, position, key_position)
        return Node(self.scalar(raw, path), position, key_position)

    def scalar(self, raw: Any, path: str) -> Any:
        kind = raw.tag.rpartition(":")[2]
        if kind in ("int", "float") and len(raw.value) > MAX_NUMBER_LENGTH:
            self.report(f"a number of {len(raw.value)} characters", raw.start_mark, path)
            return 0
        # A tag of the user's own is already a problem; its value is read as text.
        value = _CONSTRUCT.get(kind, str)(raw.value)
        if isinstance(value, float) and not math.isfinite(value):
            self.report(f"{raw.value} is not a finite number", raw.start_mark, path)
            return 0.0
        return value

    def mapping(self, raw: Any, path: str) -> dict[str, Node]:
        children: dict[str, Node] = {}
        for raw_key, raw_value in raw.value:
            if not isinstance(raw_key, yaml.ScalarNode) or not raw_key.tag.endswith(":str"):
                found = getattr(raw_key, "value", None)
                shown = found if isinstance(found, str) else "a list or mapping"
                self.report(f"keys must be text, found {shown}", raw_key.start_mark, path)
                continue
            key = raw_key.value
            child_path = f"{path}.{key}" if path else key
            if key == "<<":
                message = "merge keys (<<) are not part of the language: use extends"
                self.report(message, raw_key.start_mark, path)
            elif key in children:
                first = children[key].key_position
                line = first.line if first else 0
                message = f"duplicate key, first given in line {line}: remove one of them"
                self.report(message, raw_key.start_mark, child_path)
            else:
                children[key] = self.node(raw_value, child_path, raw_key.start_mark)
        return children


def parse(text: str, file: str, folder: str) -> Node | None:
    """Return the root node of a YAML text, None when it is empty; raises SpecError."""
    builder = _Builder(file, folder)
    refused: list[tuple[str, Any]] = []
    try:
        loader = _Loader(text, refused)
        raw: Any = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        message = f"character U+{ord(text[error.position]):04X} is not allowed in YAML"
        place = Position(file, line, column, folder)
        raise SpecError([Problem("", message, place, "source")]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        builder.report(f"malformed YAML: {detail}", mark)
        raise SpecError(builder.problems) from None
    for message, mark in refused:
        builder.report(message, mark)
    root = builder.node(raw) if raw is not None else None
    if builder.problems:
        raise SpecError(builder.problems)
    return root
