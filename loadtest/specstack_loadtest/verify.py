"""Whether everything in a folder follows from its raw files, and these are the ones that were made.

Nothing is taken on trust: hashes, summary, table and page are computed again and compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specstack_loadtest.folder import INPUTS, MANIFEST, RAW, SCENARIO, Manifest, sha256_of
from specstack_loadtest.report import REPORT, page
from specstack_loadtest.summary import SUMMARY, TABLE, as_csv, as_text, summarise

MAX_PATHS = 10
_BLOCKS = {
    "its embedded summary": r'<script type="application/json" id="summary">(.*?)</script>',
    "its text and tables": r"<body>(.*?)<script ",
    "its plots": r'<script type="application/json" id="plots">(.*?)</script>',
    "its style": r"<style>(.*?)</style>",
}
_BOKEH = re.compile(r'data-bokeh="([^"]*)"')


def verify(folder: Path) -> list[str]:
    """Say what does not follow; empty: everything does.

    Raises:
        FolderError: there is no manifest.
    """
    manifest = Manifest.read(folder)
    differences = list(_files(folder, manifest))
    try:
        summary = summarise(folder)
    except (ValueError, OSError, KeyError) as error:
        return [*differences, f"no summary can be made of the raw files: {error}"]
    differences += _summary(folder, summary)
    table = folder / TABLE
    if _text(table) != as_csv(summary):
        differences.append(f"{TABLE} is not what the raw files give")
    return [*differences, *_report(folder, page(json.loads(as_text(summary)), manifest))]


def _files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Raw files and inputs that are changed, missing, or not the manifest's."""
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif sha256_of(path) != expected:
            yield f"{name} was changed: its sha256 is not that of {MANIFEST}"
    present = [folder / SCENARIO]
    for part in (INPUTS, RAW):
        present += (path for path in (folder / part).rglob("*") if path.is_file())
    for path in sorted(present):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in manifest.files:
            yield f"{name} is not in {MANIFEST}"


def _summary(folder: Path, summary: dict[str, Any]) -> list[str]:
    text = _text(folder / SUMMARY)
    if text == as_text(summary):
        return []
    try:
        written = json.loads(text or "")
    except ValueError:
        return [f"{SUMMARY} is missing, or no JSON"]
    paths = list(differing(written, json.loads(as_text(summary))))
    more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
    if not paths:
        return [f"{SUMMARY} is written in another way than the raw files give it"]
    return [f"{SUMMARY} is not what the raw files give: {', '.join(paths[:MAX_PATHS])}{more}"]


def differing(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two values of JSON differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            missing = object()
            yield from differing(
                one.get(key, missing), other.get(key, missing), f"{path}.{key}".lstrip(".")
            )
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differing(a, b, f"{path}[{number}]")
    elif one != other:
        yield path


def _report(folder: Path, expected: str) -> Iterator[str]:
    text = _text(folder / REPORT)
    if text == expected:
        return
    if text is None:
        yield f"{REPORT} is missing"
        return
    made_with, here = (_BOKEH.findall(one) for one in (text, expected))
    if made_with != here:
        yield f"{REPORT} was made with Bokeh {made_with}, here is {here}: write it again"
    found = [
        f"{REPORT}: {name} differ from what the raw files give"
        for name, pattern in _BLOCKS.items()
        if _block(text, pattern) != _block(expected, pattern)
    ]
    yield from found or [f"{REPORT} is not what the raw files give"]


def _block(text: str, pattern: str) -> str | None:
    match = re.search(pattern, text, re.DOTALL)
    return match[1] if match else None


def _text(path: Path) -> str | None:
    return path.read_bytes().decode("utf-8", "replace") if path.exists() else None
