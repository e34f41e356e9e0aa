"""The gallery `dsl/specs/` and the examples of the language reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from specstack_dsl import SpecError, load, loads
from specstack_dsl.nodes import parse
from specstack_dsl.schema import json_schema

DSL = Path(__file__).parents[2] / "dsl"
SPECS = sorted((DSL / "specs").glob("*.yaml"))
README = (DSL / "README.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", README, flags=re.M | re.S)
*SOUND_EXAMPLES, WRONG_EXAMPLE = EXAMPLES
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def _plain(text: str) -> Any:
    node = parse(text, "<text>", ".")
    assert node is not None
    return node.plain


@pytest.mark.parametrize("file", SPECS, ids=lambda file: file.stem)
class TestGallery:
    def test_it_is_sound(self, file: Path) -> None:
        load(file)

    def test_the_schema_accepts_it(self, file: Path) -> None:
        VALIDATOR.validate(_plain(file.read_text("utf-8")))

    def test_editors_find_the_schema(self, file: Path) -> None:
        first, second = file.read_text("utf-8").splitlines()[:2]
        place = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
        assert place
        assert (file.parent / place[1]).resolve() == DSL / "schema.json"
        assert second.startswith("# ")

    def test_the_reference_lists_it(self, file: Path) -> None:
        assert f"| `{file.name}` |" in README

    def test_other_yaml_readers_read_the_same(self, file: Path) -> None:
        """Nothing in the gallery depends on the difference between YAML 1.1 and 1.2."""
        text = file.read_text("utf-8")
        assert yaml.safe_load(text) == _plain(text)


def test_quickstart_is_short_and_runs_on_a_cpu() -> None:
    file = DSL / "specs/quickstart.yaml"
    assert len(file.read_text("utf-8").splitlines()) <= 15
    assert load(file).engine.device == "cpu"


@pytest.mark.parametrize("text", SOUND_EXAMPLES)
def test_examples_of_the_reference_are_sound(text: str) -> None:
    loads(text, environ={})
    VALIDATOR.validate(_plain(text))


def test_the_spelled_out_example_is_the_two_line_example() -> None:
    short, long = (loads(text) for text in SOUND_EXAMPLES[:2])
    assert short == long.model_copy(update={"positions": short.positions})


def test_the_spelled_out_example_names_every_option() -> None:
    pipeline = loads(SOUND_EXAMPLES[1])
    for name in ("target", "drafter", "tree", "verify", "budget", "engine", "metrics"):
        for option in type(getattr(pipeline, name)).model_fields:
            assert f"{option}:" in SOUND_EXAMPLES[1], f"{name}.{option}"


def test_the_messages_of_the_reference_are_the_answer_to_its_wrong_example() -> None:
    with pytest.raises(SpecError) as caught:
        loads(WRONG_EXAMPLE, "pipeline.yaml")
    assert f"```text\n{caught.value}\n```" in README
