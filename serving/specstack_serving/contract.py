"""Does an SGLang source tree still have the surface that specstack relies on?

Reads source, imports nothing of it: a check takes about a second, works on a tree that cannot be
imported (no driver), and names what changed instead of failing at the first request.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from specstack_serving.sglang_compat import SEAMS, SGLANG_VERSION, Seam

_ALGORITHM_CALL = re.compile(r"\bspec_algo(?:rithm)?\.([a-z_]\w*)\(")


@dataclass(frozen=True)
class Finding:
    """The state of one relied-upon name."""

    name: str
    path: str
    problem: str | None
    """None when it is as expected."""


def installed_version() -> str | None:
    """Version of the installed SGLang, or None."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_root() -> Path | None:
    """Folder that holds the installed `sglang` package, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent.parent


def check(root: Path, version: str | None) -> list[Finding]:
    """Compare the tree under `root` (the folder above `sglang/`) with the table of seams."""
    tree = _SourceTree(root)
    problem = None if version == SGLANG_VERSION else f"found {version}, need {SGLANG_VERSION}"
    findings = [Finding("version", "sglang", problem)]
    findings += [Finding(n, s.path, _problem(tree, s)) for n, s in sorted(SEAMS.items())]
    findings += _algorithm_findings(tree)
    return findings


def _problem(tree: _SourceTree, seam: Seam) -> str | None:
    module, _, qualname = seam.path.partition(":")
    try:
        found = tree.find(module, qualname)
    except LookupError as error:
        return str(error)
    if isinstance(found, _Function):
        missing = [p for p in seam.parameters if not found.accepts(p)]
        return f"no parameter {', '.join(missing)}" if missing else None
    if isinstance(found, _Class):
        members = found.members()
        missing = [m for m in seam.members if m not in members]
        if missing:
            return f"no member {', '.join(missing)}"
        if seam.parameters:
            init = found.method("__init__")
            lost = [p for p in seam.parameters if init is None or not init.accepts(p)]
            return f"constructor: no parameter {', '.join(lost)}" if lost else None
    return None


def _algorithm_findings(tree: _SourceTree) -> Iterator[Finding]:
    """Everything that the core calls on an algorithm must exist on ours."""
    own_source = ast.parse(Path(__file__).with_name("algorithm.py").read_text(encoding="utf-8"))
    ours = {n.name for n in ast.walk(own_source) if isinstance(n, ast.FunctionDef)}
    base = tree.find("sglang.srt.speculative.spec_registry", "CustomSpecAlgo")
    assert isinstance(base, _Class)
    known = ours | base.members()
    for file in sorted((tree.root / "sglang" / "srt").rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            for name in _ALGORITHM_CALL.findall(line):
                if name not in known:
                    where = f"{file.relative_to(tree.root)}:{number}"
                    yield Finding(
                        f"SpecstackAlgo.{name}", where, "called on algorithms, missing on ours"
                    )


@dataclass(frozen=True)
class _Function:
    node: ast.FunctionDef | ast.AsyncFunctionDef

    def accepts(self, parameter: str) -> bool:
        a = self.node.args
        names = {arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
        return parameter in names


@dataclass(frozen=True)
class _Value:
    """A module-level assignment: it exists, and that is all we rely on."""


@dataclass(frozen=True)
class _Class:
    tree: _SourceTree
    module: str
    node: ast.ClassDef

    def members(self) -> set[str]:
        """Names that the class or its bases define, attributes set on self included."""
        names: set[str] = set()
        for item in ast.walk(self.node):
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(item.name)
            elif isinstance(item, ast.AnnAssign):
                names.add(_last_name(item.target))
            elif isinstance(item, ast.Assign):
                for target in item.targets:
                    parts = target.elts if isinstance(target, ast.Tuple) else [target]
                    names.update(map(_last_name, parts))
        for base in self.bases():
            names |= base.members()
        return names

    def method(self, name: str) -> _Function | None:
        for item in self.node.body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name == name:
                return _Function(item)
        for base in self.bases():
            if (found := base.method(name)) is not None:
                return found
        return None

    def bases(self) -> Iterator[_Class]:
        for base in self.node.bases:
            if isinstance(base, ast.Name):
                try:
                    found = self.tree.find(self.module, base.id)
                except LookupError:
                    continue  # a base outside SGLang (Enum, ABC, nn.Module)
                if isinstance(found, _Class):
                    yield found


@dataclass
class _SourceTree:
    root: Path
    _parsed: dict[str, ast.Module] = field(default_factory=dict)

    def find(self, module: str, qualname: str) -> _Function | _Class | _Value:
        """Look a definition up, through re-exports.

        Raises:
            LookupError: the module or the name is gone.
        """
        head, _, rest = qualname.partition(".")
        found = self._top_level(module, head)
        while rest:
            head, _, rest = rest.partition(".")
            method = found.method(head) if isinstance(found, _Class) else None
            if method is None:
                raise LookupError(f"{module} has no {qualname}")
            found = method
        return found

    def _top_level(self, module: str, name: str) -> _Function | _Class | _Value:
        for node in _statements(self._module(module)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return _Class(self, module, node)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return _Function(node)
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if name in {_last_name(target) for target in targets}:
                    return _Value()
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                for alias in node.names:
                    if alias.name == "*":
                        try:
                            return self._top_level(node.module or "", name)
                        except LookupError:
                            continue
                    if (alias.asname or alias.name) == name:
                        return self._top_level(node.module or "", alias.name)
        raise LookupError(f"{module} has no {name}")

    def _module(self, module: str) -> ast.Module:
        if module not in self._parsed:
            base = self.root.joinpath(*module.split("."))
            path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()),
                        None)  # fmt: skip
            if path is None:
                raise LookupError(f"no module {module}")
            self._parsed[module] = ast.parse(path.read_text(encoding="utf-8"))
        return self._parsed[module]


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Module-level statements, those under `if` and `try` included."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            handlers = [s for h in getattr(node, "handlers", ()) for s in h.body]
            pending += [*node.body, *node.orelse, *handlers]


def _last_name(target: ast.expr) -> str:
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.id if isinstance(target, ast.Name) else ""
