"""Hot-path modules never make the host wait for the device, as far as their text can tell.

What is forbidden: reading a tensor's value (.item, .tolist, .cpu, bool(), int(), float() of
anything but a name of a host value), and ops whose output shape depends on values (nonzero,
masked_select, unique, indexing with a comparison or with a name like a mask). Reading a flag
behind a check that the tensor lives on the CPU is the one exception, in `_is_known_over`; the
numpy sorts are behind the same check. What `triton.jit` compiles runs on the device.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import specstack
import specstack_kernels

KERNELS = Path(specstack_kernels.__path__[0])
FRAMEWORK = Path(specstack.__path__[0])
HOT_DRAFTERS = (
    "autoregressive", "block", "choice", "committed_layout", "conditioned", "context_writer",
    "draft_pool", "expansion", "merge", "refresh", "search", "surroundings",
)  # fmt: skip
"""Those that work on the device; the others look at tokens on the host."""
HOT_MODULES = sorted(
    [
        *(KERNELS / "torch_ops").glob("*.py"),
        *(KERNELS / "triton").glob("*.py"),
        *(FRAMEWORK / "trees").glob("*.py"),
        *(FRAMEWORK / "verify").glob("*.py"),
        *(FRAMEWORK / "drafters" / f"{name}.py" for name in HOT_DRAFTERS),
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
        if isinstance(function, ast.FunctionDef) and _is_excused(function)
        for node in ast.walk(function)
    }
    return [
        f"{node.lineno}: {what}"
        for node in ast.walk(tree)
        if id(node) not in excused and (what := _judge(node))
    ]


def _is_excused(function: ast.FunctionDef) -> bool:
    """Whether it reads values where that is free, or runs on the device itself."""
    if any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list):
        return True
    return function.name in CPU_ONLY_FUNCTIONS and "device.type" in ast.unparse(function)


def _judge(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in FORBIDDEN_CALLS:
            return f".{function.attr}()"
        is_cast = isinstance(function, ast.Name) and function.id in CASTS and node.args
        if is_cast and not isinstance(node.args[0], ast.Constant):
            assert isinstance(function, ast.Name)
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


def test_kernels_are_excused_and_their_launchers_are_not():
    kernel = "@triton.jit\ndef _kernel(x):\n    n = int(x)\n"
    assert find_syncs(kernel) == []
    assert find_syncs(kernel + "def launch(x):\n    n = int(x)\n") == ["5: int()"]
    assert find_syncs("low = float('-inf')") == []


def test_the_exception_needs_its_device_check():
    body = "    return bool(x.any())"
    assert find_syncs(f"def _is_known_over(x):\n{body}") == ["2: bool()"]
    guarded = f"def _is_known_over(x):\n    if x.device.type != 'cpu': return False\n{body}"
    assert find_syncs(guarded) == []
