"""The table of SGLang names holds on the installed wheel, and a changed copy fails by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specstack_serving import contract
from specstack_serving.sglang_compat import SGLANG_VERSION

ROOT = contract.installed_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="SGLang is not installed")


def problems(root: Path, version: str = SGLANG_VERSION) -> dict[str, str]:
    return {f.name: f.problem for f in contract.check(root, version) if f.problem}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The Python files of the installed engine that the contract reads."""
    assert ROOT is not None
    shutil.copytree(
        ROOT / "sglang",
        tmp_path / "sglang",
        ignore=lambda folder, names: [
            n for n in names if not n.endswith(".py") and not Path(folder, n).is_dir()
        ],
    )
    return tmp_path


def replace(copy: Path, file: str, old: str, new: str) -> None:
    path = copy / "sglang" / "srt" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_installed_engine_has_every_name() -> None:
    assert ROOT is not None
    assert problems(ROOT, contract.installed_version() or "") == {}


def test_another_version_is_named(copy: Path) -> None:
    assert problems(copy, "0.5.24") == {"version": "found 0.5.24, need 0.5.23"}


@pytest.mark.parametrize(
    ("file", "old", "new", "name", "problem"),
    [
        ("speculative/eagle_info.py", "class EagleVerifyInput", "class VerifyInput",
         "EagleVerifyInput", "has no EagleVerifyInput"),
        ("speculative/eagle_info.py", "    draft_token_num: int\n", "    num_draft: int\n",
         "EagleVerifyInput", "no member draft_token_num"),
        ("layers/logprob_processor.py", "    accept_index: Optional[torch.Tensor] = None,\n",
         "    accept: Optional[torch.Tensor] = None,\n",
         "compute_spec_logprobs", "no parameter accept_index"),
        ("mem_cache/allocation_sizing.py", "def get_alloc_reserve_per_decode", "def reserve",
         "get_alloc_reserve_per_decode", "has no get_alloc_reserve_per_decode"),
        ("managers/tokenizer_manager.py", "def _validate_one_request", "def _validate_request",
         "validate_one_request", "has no TokenizerManager._validate_one_request"),
    ],
)  # fmt: skip
def test_a_changed_surface_fails_by_name(
    copy: Path, file: str, old: str, new: str, name: str, problem: str
) -> None:
    replace(copy, file, old, new)
    assert problem in problems(copy)[name]


def test_a_new_method_called_on_algorithms_is_found(copy: Path) -> None:
    replace(copy, "managers/scheduler.py", "spec_algorithm.is_dspark()",
            "spec_algorithm.wants_moonlight()")  # fmt: skip
    assert "SpecstackAlgo.wants_moonlight" in problems(copy)


def test_methods_missing_from_the_stock_class_are_ours() -> None:
    """Why the class exists: without it, 0.5.23 dies at start."""
    assert ROOT is not None
    source = (ROOT / "sglang/srt/speculative/spec_registry.py").read_text()
    for name in ("carries_draft_hidden_states", "create_future_map", "need_topk"):
        assert f"def {name}" not in source


def test_every_seam_resolves_to_a_real_object() -> None:
    """In a process of its own: importing the engine chooses its platform."""
    script = (
        "from specstack_serving.sglang_compat import SEAMS, import_engine, resolve\n"
        "import_engine()\n"
        "for seam in SEAMS.values(): resolve(seam.path)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
