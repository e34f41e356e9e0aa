"""From a plan to the engine's own command line."""

from __future__ import annotations

from typing import Any

from specstack.plan import Plan, sglang_args


def server_argv(plan: Plan) -> list[str]:
    """The plan as SGLang flags: `--name value`, `--name` for true, nothing for None and false."""
    argv: list[str] = []
    for name, value in sglang_args(plan).items():
        argv += _flag(name, value)
    return argv


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple)):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]
