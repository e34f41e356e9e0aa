"""Names of SGLang's server arguments, frozen for the version that specstack runs in."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

DATA_FILE = Path(__file__).with_name("sglang_args.json")


@cache
def frozen() -> tuple[str, frozenset[str]]:
    """Return (SGLang version, argument names) of the data file."""
    data = json.loads(DATA_FILE.read_text("utf-8"))
    return data["version"], frozenset(data["names"])
