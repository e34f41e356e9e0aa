"""Files to one node tree: reading, `${VAR}`, `extends:`, and `--set` overrides.

Every node keeps the position of the text that it came from, so a message names the parent file or
the override, not the file that was opened. Nodes are not interpreted here beyond the sections that
may be written as a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specstack_dsl.errors import Position, Problem, SpecError
from specstack_dsl.nodes import MAX_DEPTH, Node, parse

MAX_BYTES = 64 * 1024
NAMED_SECTIONS = {
    "target": "model",
    "drafter": "kind",
    "tree": "kind",
    "verify": "kind",
    "budget": "kind",
}
"""Sections that may be written as a name, and the key that the name stands for."""

_VARIABLE = re.compile(r"\$\$(?=\{)|\$\{(?P<name>[A-Za-z_]\w*)(?P<default>:-[^}]*)?\}|\$\{", re.A)


@dataclass
class Document:
    """What was read: one merged tree, and the files it came from in reading order."""

    root: Node
    files: list[str] = field(default_factory=list)


def _fail(message: str, position: Position, path: str = "") -> SpecError:
    return SpecError([Problem(path, message, position, "source")])


def _read_text(file: str, asked_at: Position | None) -> str:
    """Return the text of a file; `asked_at` is the `extends` value that named it."""
    place, path = (asked_at, "extends") if asked_at else (Position(file), "")
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        subject = f"cannot read {file!r}" if asked_at else "cannot read the file"
        raise _fail(f"{subject}: {reason}", place, path) from None
    if len(data) > MAX_BYTES:
        raise _fail(f"more than {MAX_BYTES // 1024} KiB: not a pipeline", Position(file))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        column = error.start - data[: error.start].rfind(b"\n")
        message = f"not UTF-8 text: byte 0x{data[error.start]:02x}; save the file as UTF-8"
        raise _fail(message, Position(file, line, column)) from None


def _expand_text(text: str, environ: Mapping[str, str]) -> str:
    """Replace `${VAR}` and `${VAR:-default}`; `$${` stands for a literal `${`."""

    def value(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if match[0] == "$$":
            return "$"
        if name is None:
            raise ValueError("'${' begins a variable: write ${NAME}, ${NAME:-default}, or $${")
        if default is not None:
            return environ.get(name) or default[2:]
        if name not in environ:
            raise ValueError(
                f"environment variable {name} is not set: set it, or write ${{{name}:-default}}"
            )
        return environ[name]

    return _VARIABLE.sub(value, text)


def _expand(
    node: Node, environ: Mapping[str, str], problems: list[Problem], path: str = ""
) -> Node:
    """Read the environment in every string value below `node`."""
    if isinstance(node.value, dict):
        items = node.value.items()
        children = {k: _expand(v, environ, problems, f"{path}.{k}".strip(".")) for k, v in items}
        return replace(node, value=children)
    if isinstance(node.value, list):
        children_list = [
            _expand(v, environ, problems, f"{path}.{i}") for i, v in enumerate(node.value)
        ]
        return replace(node, value=children_list)
    if not isinstance(node.value, str) or "${" not in node.value:
        return node
    try:
        return replace(node, value=_expand_text(node.value, environ))
    except ValueError as error:
        problems.append(Problem(path, str(error), node.position, "source"))
        return node


def _spell_out(root: Node) -> Node:
    """Write `tree: chain` as `tree: {kind: chain}`, for every section that may be a name."""
    children = dict(root.value)
    for section, key in NAMED_SECTIONS.items():
        child = children.get(section)
        if child is not None and isinstance(child.value, str):
            children[section] = replace(child, value={key: replace(child, key_position=None)})
    return replace(root, value=children)


def _merge(parent: Node, child: Node) -> Node:
    """Return `parent` with what `child` states; a changed `kind` drops the parent's options."""
    if not (isinstance(parent.value, dict) and isinstance(child.value, dict)):
        return child
    old, new = parent.value.get("kind"), child.value.get("kind")
    if old is not None and new is not None and old.value != new.value:
        return child
    merged = dict(parent.value)
    for key, node in child.value.items():
        merged[key] = _merge(merged[key], node) if key in merged else node
    return replace(child, value=merged)


def _root_of(text: str, file: str, environ: Mapping[str, str]) -> Node:
    folder = os.path.dirname(file) or "."
    root = parse(text, file, folder)
    if root is None or root.value is None:
        message = "empty: a pipeline has at least `version: 1` and `target: MODEL`"
        raise _fail(message, Position(file, 1, 1))
    if not isinstance(root.value, dict):
        found = "a list" if isinstance(root.value, list) else repr(root.value)
        raise _fail(f"a pipeline is a mapping of sections, found {found}", root.position)
    problems: list[Problem] = []
    root = _expand(root, environ, problems)
    if problems:
        raise SpecError(problems)
    return _spell_out(root)


def _with_parents(
    root: Node, document_files: list[str], seen: tuple[str, ...], environ: Mapping[str, str]
) -> Node:
    """Merge `root` over the file that its `extends` names, and so on upwards."""
    children = dict(root.value)
    asked = children.pop("extends", None)
    root = replace(root, value=children)
    if asked is None:
        return root
    if not isinstance(asked.value, str) or not asked.value:
        message = f"expected the name of one pipeline file, found {asked.plain!r}"
        raise _fail(message, asked.position, "extends")
    file = os.path.normpath(asked.position.resolve(asked.value))
    identity = os.path.realpath(file)
    if identity in seen:
        raise _fail(f"{asked.value!r} extends itself, directly or through a parent",
                    asked.position, "extends")  # fmt: skip
    parent = _root_of(_read_text(file, asked.position), file, environ)
    document_files.append(file)
    return _merge(_with_parents(parent, document_files, (*seen, identity), environ), root)


def _assign(node: Node, keys: Sequence[str], value: Node, label: Position, path: str) -> Node:
    """Return `node` with the value below it at `keys` replaced."""
    if not keys:
        return _merge(node, value) if isinstance(value.value, dict) else value
    key, rest = keys[0], keys[1:]
    below = f"{path}.{key}" if path else key
    fresh = Node({}, label, label)
    if isinstance(node.value, list):
        if not key.isdecimal() or int(key) >= len(node.value):
            message = f"{path} has items 0 to {len(node.value) - 1}, no {key!r}"
            raise _fail(message, label, path)
        items = list(node.value)
        items[int(key)] = _assign(items[int(key)], rest, value, label, below)
        return replace(node, value=items)
    if not isinstance(node.value, dict):
        raise _fail(f"{path} is {node.value!r}, which has no {key!r}", label, path)
    if not rest:
        assigned = Node({key: value}, label, node.key_position)
        return _merge(node, assigned if path else _spell_out(assigned))
    child = _assign(node.value.get(key, fresh), rest, value, label, below)
    return replace(node, value={**node.value, key: child})


def _override(root: Node, override: str, environ: Mapping[str, str]) -> Node:
    """Apply one `path=value`, its value read as YAML."""
    label = Position(f"--set {override}", folder=".")
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    sound = equals and all(keys) and len(keys) <= MAX_DEPTH
    if not sound or keys[0] in ("extends", "version"):
        raise _fail("expected SECTION.OPTION=VALUE, for example --set tree.depth=4", label)
    parsed = parse(text, label.file, label.folder) or Node(None, label)
    problems: list[Problem] = []
    value = _expand(_relabel(parsed, label), environ, problems, name)
    if problems:
        raise SpecError(problems)
    return _assign(root, keys, value, label, "")


def _relabel(node: Node, label: Position) -> Node:
    """Give a value from the command line the override as its position."""
    value = node.value
    if isinstance(value, dict):
        value = {key: _relabel(child, label) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_relabel(child, label) for child in value]
    return Node(value, label, label)


def _kinds_first(override: str) -> int:
    """Order overrides so that choosing a part comes before setting its options."""
    keys = override.partition("=")[0].strip().split(".")
    return 0 if len(keys) == 1 else 1 if keys[-1] == "kind" else 2


def read(
    file: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Document:
    """Read a pipeline file with its parents and overrides; raises SpecError."""
    return read_text(_read_text(str(file), None), str(file), overrides, environ)


def read_text(
    text: str,
    file: str,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Document:
    """As `read`, for a text that is already in memory; `file` names it in messages."""
    environ = os.environ if environ is None else environ
    files = [file]
    root = _with_parents(_root_of(text, file, environ), files, (os.path.realpath(file),), environ)
    for override in sorted(overrides, key=_kinds_first):
        root = _override(root, override, environ)
    return Document(root, files)
