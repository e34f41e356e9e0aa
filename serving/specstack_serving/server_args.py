"""From a plan to the engine's own command line, whose parser then checks the values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Container
from typing import Any

from specstack.plan import Plan, sglang_args
from specstack_serving import sglang_compat as sgl


def known_flags() -> frozenset[str]:
    """Every option string of the engine's parser."""
    parser = argparse.ArgumentParser(add_help=False)
    sgl.ServerArgs.add_cli_args(parser)
    return frozenset(name for action in parser._actions for name in action.option_strings)


def server_argv(plan: Plan, flags: Container[str]) -> list[str]:
    """The plan as SGLang flags.

    `--name` for true; `--no-name` for false where there is one (elsewhere absent is false);
    JSON for mappings; several words for lists.
    """
    argv: list[str] = []
    for name, value in sglang_args(plan).items():
        argv += _flag("--" + name.replace("_", "-"), value, flags)
    return argv


def _flag(flag: str, value: Any, flags: Container[str]) -> list[str]:
    if value is None:
        return []
    if value is True:
        return [flag]
    if value is False:
        negation = "--no-" + flag.removeprefix("--")
        return [negation] if negation in flags else []
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    if isinstance(value, (list, tuple)):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]
