"""Hot-path modules never make the host wait for the device, as far as their text can tell.

What is forbidden: reading a tensor's value (.item, .tolist, .cpu, bool(), int(), float() of
anything but a name of a host value), and ops whose output shape depends on values (nonzero,
masked_select, unique, indexing with a comparison or with a name like a mask). Reading a flag
behind a check that the tensor lives on the CPU is the one exception, in `_is_known_over`; the
numpy sort is behind the same check.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import specstack
import specstack_kernels

KERNELS = Path(specstack_kernels.__path__[0])
FRAMEWORK = Path(specstack.__path__[0])
HOT_MODULES = sorted(
    [
        *(KERNELS / "torch_ops").glob("*.py"),
        *(FRAMEWORK / "trees").glob("*.py"),
        *(FRAMEWORK / "verify").glob("*.py"),
    ]
)
FORBIDDEN_CALLS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique",
    "unique_consecutive", "synchronize", "bincount",
}  # fmt: skip
CASTS = {"bool", "int", "float"}
CPU_ONLY_FUNCTIONS = {"_is_known_over", "_sort_ascending"}


def find_syncs(source: str) -> list[str]:
    """Return "line: what" for every suspicious expression."""
    tree = ast.parse(source)
    excused = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in CPU_ONLY_FUNCTIONS
        and "device.type" in ast.unparse(function)
        for node in ast.walk(function)
    }  # fmt: skip
    return [
        f"{node.lineno}: {what}"
        for node in ast.walk(tree)
        if id(node) not in excused and (what := _judge(node))
    ]


def _judge(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in FORBIDDEN_CALLS:
            return f".{function.attr}()"
        if isinstance(function, ast.Name) and function.id in CASTS and node.args:
            return f"{function.id}()"
    if isinstance(node, ast.Subscript) and _is_mask(node.slice):
        return f"[{ast.unparse(node.slice)}]"
    return None


def _is_mask(index: ast.expr) -> bool:
    """True for indices that are boolean by form or by name."""
    if isinstance(index, ast.Tuple):
        return any(_is_mask(part) for part in index.elts)
    if isinstance(index, ast.Compare):
        return True
    if isinstance(index, ast.UnaryOp):
        return isinstance(index.op, ast.Invert)
    return isinstance(index, ast.Name) and (
        index.id.startswith(("is_", "has_")) or index.id.endswith("mask")
    )


@pytest.mark.parametrize("path", HOT_MODULES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_hot_path_has_no_host_sync(path):
    assert find_syncs(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "n = lens.max().item()",
        "x = lens.tolist()",
        "x = lens.cpu()",
        "x = torch.nonzero(mask)",
        "x = tokens[tokens > 0]",
        "x = tokens[:, is_live]",
        "x = tokens[~done]",
        "x = tokens[tree_mask]",
        "if bool(done.all()): pass",
        "n = int(lens[0])",
    ],
)
def test_the_check_finds_a_sync(line):
    assert len(find_syncs(line)) == 1


def test_the_exception_needs_its_device_check():
    body = "    return bool(x.any())"
    assert find_syncs(f"def _is_known_over(x):\n{body}") == ["2: bool()"]
    guarded = f"def _is_known_over(x):\n    if x.device.type != 'cpu': return False\n{body}"
    assert find_syncs(guarded) == []
