"""The draft heads that travel with specstack."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from specstack.head_facts import PACKAGED_HEADS
from specstack.head_sizes import head_parameters
from specstack.models.catalogue import CATALOGUE
from specstack.models.heads.checkpoint import CARD, WEIGHTS, read_head_config
from specstack.models.heads.config import TargetShape
from specstack.training.run_file import load_run

RUNS = Path(__file__).parents[2] / "specstack/training/runs"
RECIPES = {"smollm2-135m-instruct-block": "smollm2_block.yaml"}
HEADS = sorted(folder for folder in PACKAGED_HEADS.iterdir() if folder.is_dir())
MAX_BYTES = 16_000_000


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
class TestPackagedHead:
    def test_it_is_small_and_whole(self, folder: Path) -> None:
        assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES
        config = read_head_config(folder)
        with safe_open(folder / WEIGHTS, framework="np") as file:
            sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        rows = (config.draft_vocab_size or 0) * config.target.hidden_size  # the target's own
        maps = (config.draft_vocab_size or 0) + config.target.vocab_size
        product = [s[0] * (s[1] if len(s) > 1 else 1) for s in sizes]
        assert sum(product) == head_parameters(config) - rows + maps

    def test_it_is_made_for_a_packaged_model(self, folder: Path) -> None:
        target = read_head_config(folder).target
        name = target.name.removeprefix("packaged:")
        shape = TargetShape.from_hf(CATALOGUE[name].config, name=target.name)
        assert shape == target.model_copy(update={"fingerprint": None})

    def test_its_card_says_where_it_comes_from(self, folder: Path) -> None:
        card = (folder / CARD).read_text("utf-8")
        front = yaml.safe_load(card.split("---")[1])
        assert front["license"] == "apache-2.0"
        assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest() in card
        for section in ("## Recipe", "## Data", "## Results"):
            assert section in card

    def test_its_recipe_makes_such_a_head(self, folder: Path) -> None:
        head, config = load_run(RUNS / RECIPES[folder.name]).run.head, read_head_config(folder)
        for name in ("form", "num_layers", "block_size", "mask", "slots", "context",
                     "conditioning", "draft_vocab_size", "intermediate_size"):  # fmt: skip
            assert getattr(head, name) == getattr(config, name)


def test_every_head_has_a_recipe() -> None:
    assert [folder.name for folder in HEADS] == list(RECIPES)
