"""The engine's command line: every type of value, and that SGLang's own parser reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specstack.models.catalogue import CATALOGUE
from specstack.plan import Plan, plan_file
from specstack_dsl.sglang_args import frozen
from specstack_serving.carrier import PLAN_VARIABLE
from specstack_serving.server_args import SPELT_OTHERWISE, SWITCHES, server_argv

SPECS = Path(__file__).parents[2] / "dsl" / "specs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's config without its weights."""
    config = CATALOGUE["smollm2-135m-instruct"].config
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    return tmp_path


def plan_of(spec: str, folder: Path, **args: Any) -> Plan:
    plan = plan_file(SPECS / spec, (f"target.model={folder}", "engine.device=cpu"))
    return plan.model_copy(update={"engine": plan.engine.model_copy(update={"args": args})})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("chunked_prefill_size", 512, ["--chunked-prefill-size=512"]),
        ("chunked_prefill_size", -1, ["--chunked-prefill-size=-1"]),
        ("mem_fraction_static", 0.5, ["--mem-fraction-static=0.5"]),
        ("api_key", "-a b", ["--api-key=-a b"]),
        ("disable_radix_cache", True, ["--disable-radix-cache"]),
        ("disable_radix_cache", False, []),
        ("log_level", None, []),
        ("gc_threshold", [700, 10], ["--gc-threshold", "700", "10"]),
        ("hicache_storage_backend_extra_config", {"a": [1, None]},
         ['--hicache-storage-backend-extra-config={"a": [1, null]}']),
        ("enable_tf32_matmul", False, ["--no-enable-tf32-matmul"]),
        ("enable_tf32_matmul", True, ["--enable-tf32-matmul"]),
        ("enable_tf32_matmul", None, []),
        ("fp8_gemm_runner_backend", "triton", ["--fp8-gemm-backend=triton"]),
    ],
)  # fmt: skip
def test_a_value_becomes_these_words(folder: Path, name: str, value: Any, words: list[str]) -> None:
    without = server_argv(plan_of("quickstart.yaml", folder))
    argv = server_argv(plan_of("quickstart.yaml", folder, **{name: value}))
    assert argv == [*without, *words]


def test_a_plan_without_drafts_names_no_algorithm(folder: Path) -> None:
    argv = server_argv(plan_of("plain.yaml", folder))
    assert not any("speculative" in word for word in argv)
    assert "--speculative-algorithm=SPECSTACK" in server_argv(plan_of("quickstart.yaml", folder))


ENGINE = """
import argparse, json, sys
from specstack_serving import sglang_compat as sgl
from specstack_serving.carrier import current_plan
from specstack_serving.plugin import register
from specstack_serving.server_args import server_argv
register()
sgl.load_plugins()
args = sgl.prepare_server_args(server_argv(current_plan()))
parser = argparse.ArgumentParser()
type(args).add_cli_args(parser)
actions = [(a.dest, a.option_strings, type(a).__name__) for a in parser._actions]
values = {name: getattr(args, name) for name in sys.argv[1:]}
json.dump([values, actions], open("answer.json", "w"), default=str)
"""


@pytest.mark.timeout(120)
def test_the_engine_reads_the_quickstart_as_planned(folder: Path) -> None:
    """Also: every argument of the language has the flag and the kind that we assume."""
    pytest.importorskip("sglang")
    plan = plan_of("quickstart.yaml", folder, enable_tf32_matmul=False, gc_threshold=[700, 10])
    expected = {
        "model_path": str(folder),
        "device": "cpu",
        "context_length": 4096,
        "attention_backend": "specstack_cpu",
        "speculative_algorithm": "SPECSTACK",
        "max_running_requests": plan.engine.max_running_requests,
        "enable_metrics": True,
        "enable_tf32_matmul": False,
        "gc_threshold": [700, 10],
    }
    env = {**os.environ, PLAN_VARIABLE: plan.model_dump_json()}
    run = subprocess.run(
        [sys.executable, "-c", ENGINE, *expected], env=env, cwd=folder, capture_output=True,
        text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    values, actions = json.loads(folder.joinpath("answer.json").read_text())
    assert values == expected
    flags = {flag: dest for dest, options, _ in actions for flag in options}
    for name in SPELT_OTHERWISE:
        assert flags[f"--{SPELT_OTHERWISE[name].replace('_', '-')}"] == name
    without_flag = {
        name for name in frozen()[1] - SPELT_OTHERWISE.keys()
        if flags.get(f"--{name.replace('_', '-')}") != name
    }  # fmt: skip
    assert without_flag == WITHOUT_FLAG
    assert {dest for dest, _, kind in actions if kind == "BooleanOptionalAction"} == SWITCHES


WITHOUT_FLAG = {
    "aux_hidden_state_capture", "custom_sigquit_handler", "enable_cp_tp_group_sharing",
    "grpc_worker_threads", "speculative_boundary_reduction", "stat_loggers",
    "uses_mamba_radix_cache", "watermark_context_window", "watermark_default_enabled",
    "watermark_enforce_all", "watermark_key", "watermark_key_b", "watermark_max_probability",
    "watermark_mixing_probability",
}  # fmt: skip
"""Fields that SGLang sets itself, or reads from other arguments: its parser refuses them."""
