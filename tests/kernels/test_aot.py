"""Every Triton kernel compiles for every GPU that we name, within its recorded resources."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import specstack_kernels.triton
from specstack_kernels.aot import (
    CAPABILITIES,
    MAX_REGISTERS,
    MAX_SHARED_BYTES,
    AotCase,
    all_cases,
    compile_case,
)

README = Path(__file__).parents[2] / "kernels" / "README.md"
CASES = {case.name: case for case in all_cases()}
ROW = re.compile(r"^\| (?P<name>[^|]+) \| \d+ \|(?P<cells>(?: \d+ / \d+ / \d+ \|)+)$", re.M)


def recorded() -> dict[str, list[tuple[int, int, int]]]:
    """{case: (registers, shared bytes, spilled bytes) per capability}."""
    rows = {}
    for row in ROW.finditer(README.read_text("utf-8")):
        cells = [cell.split("/") for cell in row["cells"].strip(" |").split("|")]
        rows[row["name"]] = [tuple(map(int, cell)) for cell in cells]
    return rows


RECORDED = recorded()


def test_the_table_names_every_case_once():
    names = [case.name for case in all_cases()]
    assert sorted(RECORDED) == sorted(names)
    assert len(set(names)) == len(names)


def test_every_kernel_has_a_case():
    for found in iter_modules(specstack_kernels.triton.__path__):
        module = import_module(f"specstack_kernels.triton.{found.name}")
        kernels = {k for k in vars(module) if re.fullmatch(r"_\w+_kernel", k)}
        own = {k for k in kernels if vars(module)[k].__module__ == module.__name__}
        compiled = {case.kernel.__name__ for case in module.aot_cases()}
        assert own <= compiled, found.name


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_stays_within_what_is_recorded(name):
    for capability, limits in zip(CAPABILITIES, RECORDED[name], strict=True):
        taken = compile_case(CASES[name], capability)
        assert taken.registers <= min(limits[0], MAX_REGISTERS), capability
        assert taken.shared_bytes <= min(limits[1], MAX_SHARED_BYTES[capability]), capability
        assert taken.spilled_bytes <= limits[2], capability


def test_another_assembler_in_the_environment_changes_nothing(monkeypatch):
    """FlashInfer names one when it is imported."""
    case = next(iter(CASES.values()))
    expected = compile_case(case, 100)
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "/nowhere/ptxas")
    assert compile_case(case, 100) == expected
    assert os.environ["TRITON_PTXAS_BLACKWELL_PATH"] == "/nowhere/ptxas"


def test_what_does_not_compile_is_noticed():
    """Control: a wrong type of an argument."""
    case = next(iter(CASES.values()))
    broken = dict.fromkeys(case.signature, "i32")
    with pytest.raises(Exception, match=r"(?i)pointer|type|error"):
        compile_case(AotCase(case.name, case.kernel, broken, case.constexprs), 90)
