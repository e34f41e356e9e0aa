"""Where cost tables are kept, and which one belongs to a plan on this machine.

One file per key, `<cache>/costs/<digest>.json`, that appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from specstack.budget.cost_table import CostKey, CostTable, CostTableError
from specstack.models.heads.errors import sentences
from specstack.models.packaged import cache_folder

if TYPE_CHECKING:
    from specstack.plan import Plan

WITHOUT_COST = (
    "admin_", "api_key", "bucket_", "chat_template", "decode_log_", "log_", "metrics_",
    "prompt_tokens_buckets", "random_seed", "reasoning_parser", "served_", "show_", "skip_server_",
    "ssl_", "tool_call_parser", "watchdog_",
)  # fmt: skip
"""Beginnings of engine arguments that are no part of a key."""
AGAIN = "measure here: `specstack bench cost`"


def table_path(key: CostKey) -> Path:
    """Where the table of a key is, or would be."""
    return cache_folder() / "costs" / f"{key.digest}.json"


def load_table(key: CostKey) -> CostTable | None:
    """Return the stored table of a key, None where nothing was measured yet.

    Raises:
        CostTableError: there is a file, but it is no table of this key.
    """
    path = table_path(key)
    return read_table(path, key) if path.exists() else None


def read_table(path: str | Path, expected_key: CostKey | None = None) -> CostTable:
    """Read a table; None expects nothing of its key.

    Raises:
        CostTableError: it cannot be read, is no table, or was measured for something else; names
            every field of the key that differs, with both values.
    """
    try:
        table = CostTable.model_validate(json.loads(Path(path).read_text("utf-8")))
    except OSError as error:
        raise CostTableError(f"{path}: {error.strerror}: {AGAIN}") from None
    except ValidationError as error:
        reason = "; ".join(sentences(error))
        raise CostTableError(f"{path} is no cost table: {reason}") from None
    except ValueError as error:
        raise CostTableError(f"{path} is no cost table: {error}: {AGAIN}") from None
    if expected_key is not None and (differences := expected_key.differences(table.key)):
        raise CostTableError(
            f"{path} was measured for something else: {'; '.join(differences)}: {AGAIN}"
        )
    return table


def save_table(table: CostTable, path: Path | None = None) -> Path:
    """Write a table to `path`, or where `load_table` finds it; returns the path.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    path = table_path(table.key) if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    work = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(table.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        work.chmod(0o644)
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
    return path


def cost_key(plan: Plan, device_name: str, threads: int, sglang_version: str) -> CostKey:
    """What the times of a plan depend on, on one machine.

    Budgets, prices and the longest context are no part of it: a table holds for every policy.

    Args:
        device_name: of the GPU; on a CPU `machine_name()`.
        threads: that compute, on a CPU; on a GPU they do not matter.
    """
    engine = plan.engine
    words = [f"sglang {sglang_version}", engine.attention_backend, f"page {engine.page_size}"]
    words.append(f"tp {engine.tp}")
    if engine.device == "cpu":
        words.append(f"threads {threads}")
    if args := {name: value for name, value in engine.args.items() if _costs_time(name)}:
        words.append(f"args {_digest(args)}")  # their values may be secrets
    return CostKey(
        device=device_name,
        model=plan.target.model,
        drafter=_drafter_name(plan),
        engine=", ".join(words),
        dtype=plan.target.dtype,
    )


def _costs_time(argument: str) -> bool:
    """Whether an argument of the engine may change how long rounds take; secrets never do."""
    return not argument.startswith(WITHOUT_COST)


def machine_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name; its architecture where the system does not tell."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.machine()


def _drafter_name(plan: Plan) -> str:
    """Kind, heads, and a digest of the options, which decide how much is drafted at a budget."""
    words = ["+".join(plan.merged_drafters) or plan.drafter.kind]
    for head in plan.heads:
        config = "unknown" if head.config is None else _digest(head.config.model_dump(mode="json"))
        words.append(f"head {head.checkpoint} ({head.form}, config {config})")
    options = {
        **_portable(plan.drafter.options),
        "of": [
            {**part, "options": _portable(part["options"])}
            for part in plan.drafter.options.get("of", ())
        ],
    }
    words.append(f"tree {plan.tree.kind}")
    words.append(f"options {_digest(options)}")
    return ", ".join(words)


def _portable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without the local path of a head, which `checkpoint` names in the plan's heads."""
    return {name: value for name, value in options.items() if name != "checkpoint"}


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
