"""Published measurements follow from the raw data that lie beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specstack_loadtest.verify import verify

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
PUBLISHED = ("chat-burst", "crossover")


def test_all_that_is_published_is_checked() -> None:
    found = {manifest.parent.name for manifest in BENCHMARKS.glob("*/manifest.json")}
    assert found == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_number_follows_from_its_raw_data(name: str) -> None:
    assert verify(BENCHMARKS / name) == []


def test_a_published_answer_that_took_longer_would_be_noticed(tmp_path: Path) -> None:
    """Control."""
    folder = tmp_path / "copy"
    shutil.copytree(BENCHMARKS / "chat-burst", folder)
    records = next(folder.glob("raw/*/0/requests.jsonl"))
    lines = records.read_text("utf-8").splitlines()
    records.write_text("\n".join(lines[:-1]) + "\n", "utf-8")
    found = verify(folder)
    assert any("was changed" in one for one in found)
    assert any("summary.json is not what the raw files give" in one for one in found)
