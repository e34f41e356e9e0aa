"""What is compared, and in which turns."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import pytest

from specstack.applications import PLAIN_OVERRIDES
from specstack_dsl import PlanError
from specstack_loadtest import sides
from specstack_loadtest.compare import Comparison, turns
from specstack_loadtest.folder import Manifest
from specstack_loadtest.sides import Side, pipeline_sides, url_side


@pytest.fixture
def pipelines(tmp_path: Path) -> tuple[str, str]:
    paths = tmp_path / "tree.yaml", tmp_path / "chain.yaml"
    for path in paths:
        path.write_text("version: 1\ntarget: some/model\ndrafter: ngram\ntree: chain\n")
    return str(paths[0]), str(paths[1])


def test_plain_decoding_has_the_first_pipelines_target(
    pipelines: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[str, tuple[str, ...]]] = []

    def serve(file: Path, overrides: tuple[str, ...], log: Path) -> Any:
        started.append((file.name, overrides))
        return nullcontext("http://127.0.0.1:1")

    monkeypatch.setattr(sides, "load", lambda *_, **__: serve)
    own = ("engine.context_length=512",)
    made = pipeline_sides(pipelines, own, plain=True)
    assert [side.name for side in made] == ["plain", "tree", "chain"]
    for side in made:
        with side.start(tmp_path / "log") as url:
            assert url == "http://127.0.0.1:1"
    assert started == [
        ("tree.yaml", (*own, *PLAIN_OVERRIDES)),
        ("tree.yaml", own),
        ("chain.yaml", own),
    ]
    assert [side.name for side in pipeline_sides(pipelines, (), plain=False)] == ["tree", "chain"]


def test_a_pipeline_can_be_named(pipelines: tuple[str, str]) -> None:
    made = pipeline_sides((pipelines[0], f"wide={pipelines[0]}"), (), plain=False)
    assert [side.name for side in made] == ["tree", "wide"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("{0}", "{0}"), "two pipelines are called 'tree'"),
        (("plain={0}",), "'plain' is the baseline's name"),
        ((".a={0}",), "'.a' cannot name a side"),
        (("a/b={0}",), "'a/b' cannot name a side"),
        (("nowhere.yaml",), "no such file"),
    ],
)
def test_sides_that_cannot_be_told_apart_are_refused(
    pipelines: tuple[str, str], given: tuple[str, ...], words: str
) -> None:
    with pytest.raises(click.ClickException, match=words):
        pipeline_sides([text.format(pipelines[0]) for text in given], (), plain=True)


def test_a_pipeline_that_cannot_run_here_is_refused_before_any_is_started(
    pipelines: tuple[str, str], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.yaml"
    text = Path(pipelines[0]).read_text()
    wrong.write_text(text.replace("some/model", "./no-such-folder"))
    with pytest.raises(PlanError, match="no-such-folder"):
        pipeline_sides((pipelines[0], str(wrong)), (), plain=True)


def test_a_side_that_does_not_start_was_not_killed(tmp_path: Path) -> None:
    def start(log: Path) -> Any:
        raise click.ClickException("the server ended")

    manifest = Manifest(
        kind="compare", scenario={}, sides=("a",), baseline=None, repeats=1, side_facts={},
        num_workers=1, command="",
    )  # fmt: skip
    comparison = Comparison(tmp_path, manifest, {"scenario.yaml": b""}, (Side("a", {}, start),))
    with pytest.raises(click.ClickException, match="the server ended"):
        comparison.run(lambda title: lambda snapshot: None, print)
    assert Manifest.read(tmp_path).incomplete == ()


def test_every_repeat_begins_with_another_side() -> None:
    a, b, c = (url_side(name, "http://127.0.0.1:1") for name in "abc")
    order = ["".join(side.name for r, side in turns((a, b, c), 4) if r == n) for n in range(4)]
    assert order == ["abc", "bca", "cab", "abc"]


def test_what_a_pipeline_says_is_known_by_its_hash(pipelines: tuple[str, str]) -> None:
    """A folder is not gone on with after a pipeline has changed."""

    def digest(*overrides: str) -> str:
        (side,) = pipeline_sides(pipelines[:1], overrides, plain=False)
        return str(side.facts["pipeline_sha256"])

    before = digest()
    assert digest("tree.depth=2") != before
    path = Path(pipelines[0])
    path.write_text(path.read_text() + "# the same\n")
    assert digest() == before
    path.write_text(path.read_text().replace("tree: chain", "tree: best_first"))
    assert digest() != before


def test_a_side_that_runs_already_names_no_folder_elsewhere() -> None:
    for name in ("/tmp/x", "..", "org/model", ""):
        with pytest.raises(click.ClickException, match="cannot name a side"):
            url_side(name, "http://127.0.0.1:1")
