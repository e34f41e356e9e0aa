"""Sizes and shapes that every file of the project keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("specstack", "dsl", "kernels", "loadtest", "serving", "tests")
NOT_PACKAGES = ("dsl", "kernels", "serving", "loadtest", "tests")
MAX_FILE, MAX_FUNCTION, MAX_JIT_FUNCTION = 500, 80, 120


def _is_jit(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def faults(file: Path) -> Iterator[str]:
    """Yield what is wrong with a Python file."""
    text = file.read_text("utf-8")
    tree = ast.parse(text)
    lines = text.count("\n")
    if lines > MAX_FILE:
        yield f"{lines} lines, at most {MAX_FILE}"
    if not ast.get_docstring(tree):
        yield "no module docstring"
    if file.name in ("utils.py", "helpers.py", "common.py"):
        yield f"{file.name} says nothing: name it after what it holds"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = MAX_JIT_FUNCTION if _is_jit(node) else MAX_FUNCTION
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                yield f"{node.name} has {length} lines, at most {limit}"


FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_keeps_the_style(file: Path) -> None:
    assert list(faults(file)) == []


def top_level_packages(root: Path) -> list[str]:
    """Return the folders of the top level that an `__init__.py` makes importable by mistake."""
    return [name for name in NOT_PACKAGES if (root / name / "__init__.py").exists()]


def test_no_folder_of_the_top_level_shadows_a_package() -> None:
    """A bare `kernels` would shadow the package of that name, which SGLang imports."""
    assert top_level_packages(ROOT) == []


BODY = "    x = 1\n"


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.py", "x = 1\n", "no module docstring"),
        ("utils.py", '"""Doc."""\n', "utils.py says nothing: name it after what it holds"),
        ("a.py", '"""Doc."""\n' + "\n" * 500, "501 lines, at most 500"),
        ("a.py", '"""Doc."""\ndef f():\n' + BODY * 80, "f has 81 lines, at most 80"),
        (
            "a.py",
            '"""Doc."""\n@triton.jit\ndef f():\n' + BODY * 120,
            "f has 121 lines, at most 120",
        ),
        ("a.py", '"""Doc."""\nasync def f():\n' + BODY * 80, "f has 81 lines, at most 80"),
    ],
)
def test_a_fault_is_noticed(tmp_path: Path, name: str, text: str, fault: str) -> None:
    """Control: one fault per file."""
    file = tmp_path / name
    file.write_text(text)
    assert list(faults(file)) == [fault]


def test_a_file_at_its_limits_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Doc."""\n@triton.jit\ndef f():\n' + BODY * 119 + "def g():\n" + BODY * 79)
    assert list(faults(file)) == []


def test_a_package_at_the_top_level_is_noticed(tmp_path: Path) -> None:
    """Control."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").touch()
    assert top_level_packages(tmp_path) == ["kernels"]
