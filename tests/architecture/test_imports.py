"""Who may import whom: the contracts of pyproject.toml, and what a fresh interpreter loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
SOURCES = {name for contract in LINTER["contracts"] for name in contract["source_modules"]}
FOLDERS = {
    "specstack_dsl": "dsl",
    "specstack_kernels": "kernels",
    "specstack_loadtest": "loadtest",
    "specstack_serving": "serving",
}


def path_of(module: str) -> Path:
    """Of a module without its suffix, of a package its folder."""
    top, *rest = module.split(".")
    return ROOT.joinpath(FOLDERS.get(top, "."), top, *rest)


def modules_without_torch() -> list[str]:
    """Every module that a contract keeps from torch, those of packages one by one."""
    found = set()
    for contract in LINTER["contracts"]:
        if "torch" not in contract["forbidden_modules"]:
            continue
        for name in contract["source_modules"]:
            found.add(name)
            top = path_of(name)
            found |= {
                ".".join((name, *file.relative_to(top).with_suffix("").parts))
                for file in top.rglob("[!_]*.py")
            }
    return sorted(found - {"specstack_loadtest.locustfile"})


LOADED = (
    "import sys; print(*sorted({'torch', 'sglang', 'triton', 'transformers'} & set(sys.modules)))"
)


def loaded_after(statements: str) -> list[str]:
    """Return the heavy packages that a fresh interpreter holds after running statements."""
    code = f"{statements}\n{LOADED}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()[-1].split()


def test_planning_and_the_command_line_load_neither_torch_nor_sglang() -> None:
    assert loaded_after("\n".join(f"import {name}" for name in modules_without_torch())) == []


@pytest.mark.parametrize("command", ["check", "explain", "compile"])
def test_commands_over_the_language_run_without_torch(command: str) -> None:
    file = ROOT / "dsl/specs/quickstart.yaml"
    call = f"try: main(['{command}', '{file}'])\nexcept SystemExit: pass"
    assert loaded_after(f"from specstack.cli import main\n{call}") == []


def test_help_loads_no_application() -> None:
    assert loaded_after("from specstack.cli import main\nmain(['--help'])") == []


def test_a_fresh_interpreter_that_loads_torch_is_noticed() -> None:
    """Control: tensors need torch."""
    assert "torch" in loaded_after("import specstack.types")


def lint(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [str(program), "--config", str(config), "--no-cache"],
        cwd=folder, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_no_package_imports_what_its_layer_may_not() -> None:
    result = lint(ROOT, ROOT / "pyproject.toml")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "statement", "broken"),
    [
        ("specstack_dsl/x.py", "import torch", "the language imports no torch"),
        ("specstack_dsl/x.py", "import specstack.plan", "the language imports no torch"),
        ("specstack_kernels/x.py", "import specstack", "kernels are tensors in, tensors out"),
        ("specstack/x.py", "import sglang", "the framework does not know its applications"),
        ("specstack/x.py", "import specstack_serving", "the framework does not know its"),
        ("specstack/plan.py", "import torch", "planning needs neither torch nor the engine"),
        ("specstack/budget/x.py", "import specstack.heavy", "planning needs neither torch"),
        ("specstack/models/heads/config.py", "import torch", "planning needs neither torch"),
        ("specstack/training/answers.py", "import torch", "answers are regenerated without"),
        ("specstack_serving/x.py", "import specstack.training", "serving neither trains nor"),
        ("specstack_serving/x.py", "import specstack.evaluation", "serving neither trains nor"),
        ("specstack_serving/x.py", "import specstack_loadtest", "serving neither trains nor"),
        ("specstack_loadtest/x.py", "import specstack_serving", "load tests are a client of"),
        ("specstack_loadtest/cli.py", "import gevent", "commands of load tests leave gevent's"),
    ],
)
def test_an_import_across_layers_is_noticed(
    tmp_path: Path, file: str, statement: str, broken: str
) -> None:
    """Control: a copy of the layout with one wrong import."""
    names = {*LINTER["root_packages"], "specstack.evaluation", "specstack.training", *SOURCES}
    parts = [name.split(".") for name in names]
    for module in sorted({".".join(one[:i]) for one in parts for i in range(1, len(one) + 1)}):
        folder = tmp_path.joinpath(*module.split("."))
        is_package = (ROOT / path_of(module)).is_dir()
        path = folder / "__init__.py" if is_package else folder.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "specstack/heavy.py").write_text("import torch\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    clean = lint(tmp_path, tmp_path / "pyproject.toml")
    assert clean.returncode == 0, clean.stdout
    (tmp_path / file).write_text(statement + "\n")
    result = lint(tmp_path, tmp_path / "pyproject.toml")
    assert result.returncode == 1
    assert any(broken in line and "BROKEN" in line for line in result.stdout.splitlines())
