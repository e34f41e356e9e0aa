"""Triton kernels compiled ahead of time, without a GPU, and what each takes of a multiprocessor.

`python -m specstack_kernels.aot` prints the table of `kernels/README.md`, which the tests hold the
kernels to. Registers and shared memory are ptxas' own numbers, read from the cubin.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

CAPABILITIES = (80, 90, 100)
"""A100, H100 and H200, B200."""
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory of one thread block (CUDA C++ programming guide, compute capabilities)."""
MAX_REGISTERS = 255
"""Per thread."""
ASSEMBLERS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
"""Environment variables that name another one."""


@dataclass(frozen=True)
class AotCase:
    """One kernel at one set of compile-time constants."""

    name: str
    """Op and shape, unique: `draft_attention C128 page1`."""
    kernel: Any
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """Triton type of every run-time argument by name: `*bf16`, `*i64`, `*i1`, `i32`, `fp32`."""
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int
    """Per thread."""
    shared_bytes: int
    """Per thread block, static and dynamic."""
    spilled_bytes: int
    """Local memory per thread, which is in device memory."""


def all_cases() -> Iterator[AotCase]:
    """The cases of every module of `specstack_kernels.triton`."""
    package = import_module("specstack_kernels.triton")
    for module in sorted(iter_modules(package.__path__), key=lambda found: found.name):
        yield from import_module(f"{package.__name__}.{module.name}").aot_cases()


def compile_case(case: AotCase, capability: int) -> Resources:
    """Compile for sm_`capability`. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    missing = set(names) ^ {*case.signature, *case.constexprs}
    assert not missing, f"{case.name}: {missing} are not typed, or no arguments"
    source = ASTSource(
        case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in case.constexprs.items()},
        # Tensors start on 16 bytes, as torch allocates them.
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if case.signature.get(name, "").startswith("*")
        },
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    target = GPUTarget("cuda", capability, 32)
    with _tritons_own_assembler():
        compiled = triton.compile(source, target=target, options=options)
    return _resources(compiled.asm["cubin"], compiled.metadata.shared)


@contextmanager
def _tritons_own_assembler() -> Iterator[None]:
    """The ptxas that comes with Triton: importing FlashInfer points Triton at the machine's."""
    others = {name: os.environ.pop(name) for name in ASSEMBLERS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(others)


def _resources(cubin: bytes, dynamic_shared: int) -> Resources:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    return Resources(
        registers=found["REG"],
        shared_bytes=found["SHARED"] + dynamic_shared,
        spilled_bytes=found["STACK"] + found["LOCAL"],
    )


def table() -> str:
    """The table of `kernels/README.md`: registers / shared memory (bytes) / spilled bytes."""
    heads = " | ".join(f"sm_{capability}" for capability in CAPABILITIES)
    lines = [f"| kernel | warps | {heads} |", "|---" * (2 + len(CAPABILITIES)) + "|"]
    for case in all_cases():
        cells = [case.name, str(case.num_warps)]
        for capability in CAPABILITIES:
            taken = compile_case(case, capability)
            cells.append(f"{taken.registers} / {taken.shared_bytes} / {taken.spilled_bytes}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
