"""Text to `Pipeline`: every section checked by its part, then the cross-part rules, all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specstack_dsl.errors import Problem, SpecError, did_you_mean, in_file_order
from specstack_dsl.messages import found, nearest, problems_of
from specstack_dsl.nodes import Node
from specstack_dsl.parts import CONTRACTS, SINGLE, Part, Section, Target, catalogue
from specstack_dsl.rules import broken_rules
from specstack_dsl.sections import LANGUAGE_VERSION, SECTIONS, Pipeline, default_section
from specstack_dsl.source import Document, read, read_text

__all__ = ["Pipeline", "check", "load", "loads"]


class _Reader:
    """Checks one document section by section and collects every problem."""

    def __init__(self, document: Document) -> None:
        self.root = document.root
        self.files = document.files
        self.positions = {path: node.position for path, node in self.root.walk()}
        self.keys = {path: node.key_position or node.position for path, node in self.root.walk()}
        self.problems: list[Problem] = []
        self.sections: dict[str, Section] = {}

    def report(self, path: str, message: str, *, at_key: bool = False) -> None:
        place = nearest(path, self.keys if at_key else self.positions)
        self.problems.append(Problem(path, message, place, "types"))

    def check_root(self) -> None:
        known = ("version", *SECTIONS)
        for name in self.root.value:
            if name not in known:
                sections = f"a pipeline has version, extends, {', '.join(SECTIONS)}"
                hint = did_you_mean(name, (*known, "extends"))
                self.report(name, f"unknown section: {sections}{hint}", at_key=True)
        version = self.root.value.get("version")
        if version is None:
            self.report("version", f"missing: write `version: {LANGUAGE_VERSION}`")
        elif version.value != LANGUAGE_VERSION or isinstance(version.value, bool):
            self.report("version", f"expected {LANGUAGE_VERSION}, found {found(version.plain)}")
        if "target" not in self.root.value:
            self.report("target", "missing: name the model, for example `target: Qwen/Qwen3-8B`")

    def section(self, name: str, node: Node) -> None:
        """Read one section that was written."""
        if not isinstance(node.value, dict):
            what = "a name or a mapping" if name in CONTRACTS or name == "target" else "a mapping"
            self.report(name, f"expected {what}, found {found(node.plain)}")
            return
        model = SINGLE.get(name)
        if model is None:
            made: Section | None = self.part(name, name, node.value)
        else:
            data = {key: child.plain for key, child in node.value.items()}
            made = self.validate(model, data, name, name, name)
        if made is not None:
            self.sections[name] = made

    def part(self, section: str, path: str, children: Mapping[str, Node]) -> Part | None:
        """Read a part of `section` that stands at `path`; None if it is unsound."""
        model = self.kind_of(section, path, children)
        if model is None:
            return None
        data = {key: child.plain for key, child in children.items() if key != "kind"}
        if model.nested is not None and isinstance(data.get(model.nested), list):
            inner = f"{path}.{model.nested}"
            members = [
                self.member(section, f"{inner}.{index}", child)
                for index, child in enumerate(children[model.nested].value)
            ]
            if None in members:
                return None
            data[model.nested] = members
        if model.inner is not None and data.get(model.inner) is not None:
            inside = self.member(section, f"{path}.{model.inner}", children[model.inner])
            if inside is None:
                return None
            data[model.inner] = inside
        made = self.validate(model, data, section, path, f"{section} {model.kind}")
        assert made is None or isinstance(made, Part)
        return made

    def member(self, section: str, path: str, node: Node) -> Part | None:
        """Read a part inside another one; it may be written as its name."""
        if isinstance(node.value, str):
            return self.part(section, path, {"kind": node})
        if isinstance(node.value, dict):
            return self.part(section, path, node.value)
        self.report(path, f"expected a name or a mapping, found {found(node.plain)}")
        return None

    def validate(
        self, model: type[Section], data: dict[str, Any], section: str, path: str, owner: str
    ) -> Section | None:
        try:
            return model.model_validate(data)
        except ValidationError as error:
            places = self.positions, self.keys
            self.problems += problems_of(error, model, owner, section, path, *places)
            return None

    def kind_of(self, section: str, path: str, children: Mapping[str, Node]) -> type[Part] | None:
        kinds = catalogue()[section]
        node = children.get("kind")
        if node is None:
            self.report(path, f"missing kind: one of {', '.join(kinds)}")
            return None
        if not isinstance(node.value, str) or node.value not in kinds:
            hint = did_you_mean(node.value, kinds) if isinstance(node.value, str) else ""
            message = f"expected one of {', '.join(kinds)}, found {found(node.plain)}{hint}"
            self.report(f"{path}.kind", message)
            return None
        return kinds[node.value]

    def read(self) -> tuple[Pipeline, frozenset[str]]:
        """Return the pipeline and its sound sections; defaults stand in for the others."""
        self.check_root()
        for name in SECTIONS:
            if name in self.root.value:
                self.section(name, self.root.value[name])
        unsound = {name for name in SECTIONS if name in self.root.value} - self.sections.keys()
        if "target" not in self.sections:
            unsound.add("target")
            self.sections["target"] = Target.model_validate({"model": "unreadable"})
        for name in SECTIONS:
            if name not in self.sections:
                self.sections[name] = default_section(name, self.sections)
        values: dict[str, Any] = {**self.sections, "version": LANGUAGE_VERSION}
        pipeline = Pipeline(**values, positions=self.positions)
        return pipeline, frozenset(SECTIONS) - unsound


def check(document: Document) -> Pipeline:
    """Check types, kinds and cross-part rules; raises SpecError with every problem."""
    reader = _Reader(document)
    pipeline, sound = reader.read()
    problems = [*reader.problems, *broken_rules(pipeline, sound)]
    if problems:
        raise SpecError(in_file_order(problems, document.files))
    return pipeline


def load(
    file: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Pipeline:
    """Read and check a pipeline file; `overrides` are `path=value`; raises SpecError."""
    return check(read(file, overrides, environ))


def loads(
    text: str,
    file: str = "<text>",
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Pipeline:
    """As `load`, for a text in memory; `file` names it in messages and anchors its paths."""
    return check(read_text(text, file, overrides, environ))
