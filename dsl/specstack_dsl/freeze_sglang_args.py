"""Writes `sglang_args.json` again: `python -m specstack_dsl.freeze_sglang_args`.

Parses the field declarations of the installed SGLang; imports none of its code.
"""

from __future__ import annotations

import ast
import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from specstack_dsl.sglang_args import DATA_FILE


def installed() -> tuple[str, frozenset[str]]:
    """Return (version, argument names) of SGLang; raises ModuleNotFoundError without one."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("SGLang is not installed")
    folder = Path(spec.submodule_search_locations[0], "srt", "arg_groups", "fields")
    names = {
        statement.target.id
        for file in folder.glob("*.py")
        for declaration in ast.parse(file.read_text("utf-8")).body
        if isinstance(declaration, ast.ClassDef)
        for statement in declaration.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return version("sglang"), frozenset(name for name in names if not name.startswith("_"))


def main() -> None:
    """Write the data file."""
    sglang_version, names = installed()
    content = {"version": sglang_version, "names": sorted(names)}
    DATA_FILE.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
