"""Who may import whom: the contracts of pyproject.toml, and what a fresh interpreter loads."""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import specstack.budget
import specstack.metrics
import specstack_dsl
import specstack_dsl.parts

ROOT = Path(__file__).parents[2]
TORCH_FREE_PACKAGES = (specstack_dsl, specstack_dsl.parts, specstack.budget, specstack.metrics)
TORCH_FREE_MODULES = [
    "specstack.applications",
    "specstack.bind",
    "specstack.cli",
    "specstack.explain",
    "specstack.facts",
    "specstack.graph_shapes",
    "specstack.calibration_file",
    "specstack.head_facts",
    "specstack.head_rules",
    "specstack.head_sizes",
    "specstack.hf_config",
    "specstack.locate",
    "specstack.memory",
    "specstack.models.heads.config",
    "specstack.parts_help",
    "specstack.plan",
    "specstack.plan_rules",
    "specstack.processes",
    "specstack.prompts",
    "specstack.replan",
    "specstack.request_traces",
    "specstack.resolve",
    "specstack.terminal",
    "specstack.training.cli",
    *(
        f"{package.__name__}.{module.name}"
        for package in TORCH_FREE_PACKAGES
        for module in pkgutil.iter_modules(package.__path__)
    ),
]
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
    assert loaded_after("\n".join(f"import {name}" for name in TORCH_FREE_MODULES)) == []


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


PLANNING_FILES = (
    "applications",
    "cli",
    "explain",
    "facts",
    "graph_shapes",
    "calibration_file",
    "head_facts",
    "head_rules",
    "head_sizes",
    "hf_config",
    "locate",
    "memory",
    "models/heads/config",
    "models/heads/errors",
    "parts_help",
    "plan",
    "plan_rules",
    "prompts",
    "replan",
    "request_traces",
    "resolve",
)
PACKAGES = ("budget", "evaluation", "metrics", "models", "models/heads", "training")
ANSWER_FILES = (
    "answer_file",
    "answers",
    "answers_meta",
    "chat_client",
    "cli",
    "progress",
    "regenerate",
    "regenerate_job",
)


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
    modules = ["specstack_dsl/", "specstack_kernels/", "specstack/", "specstack_serving/"]
    modules += ["specstack_loadtest/", "specstack_loadtest/cli.py"]
    modules += [f"specstack/{name}/" for name in PACKAGES]
    modules += [f"specstack/{name}.py" for name in PLANNING_FILES]
    modules += [f"specstack/training/{name}.py" for name in ANSWER_FILES]
    for module in modules:
        path = tmp_path / (f"{module}__init__.py" if module.endswith("/") else module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "specstack/heavy.py").write_text("import torch\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert lint(tmp_path, tmp_path / "pyproject.toml").returncode == 0
    (tmp_path / file).write_text(statement + "\n")
    result = lint(tmp_path, tmp_path / "pyproject.toml")
    assert result.returncode == 1
    assert any(broken in line and "BROKEN" in line for line in result.stdout.splitlines())
