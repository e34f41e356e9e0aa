"""Folders of comparisons: self-contained, gone on with only by the same comparison."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from specstack_loadtest import folder
from specstack_loadtest.folder import (
    FolderError,
    Manifest,
    digest,
    freeze,
    is_whole,
    open_folder,
    raw_folder,
)
from specstack_loadtest.scenario_file import load_scenario

PROMPT = '{"id": "a", "prompt": "Say hello."}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for part in ("one", "two"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "prompts.jsonl").write_text(PROMPT.replace("hello", part))
    path = tmp_path / "small.yaml"
    path.write_text(
        "version: 1\narrivals: {kind: closed, users: 1}\n"
        "workload: {prompts: [one/prompts.jsonl, two/prompts.jsonl], output_tokens: 4}\n"
        "stop: {requests: 2}\n"
    )
    return path


def manifest(**changed: object) -> Manifest:
    made = Manifest(
        kind="compare",
        scenario={"name": "small", "file": "small.yaml", "sha256": "0"},
        sides=("plain", "tree"),
        baseline="plain",
        repeats=2,
        side_facts={"plain": {}, "tree": {"overrides": ["tree.depth=2"]}},
        num_workers=1,
        command="specstack load compare",
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def test_a_frozen_scenario_is_the_scenario_without_the_files_it_came_from(
    file: Path, tmp_path: Path
) -> None:
    scenario = load_scenario(str(file))
    files = freeze(scenario)
    folder = tmp_path / "run"
    open_folder(folder, manifest(), files)
    for part in ("one", "two"):  # names that are equal are told apart
        (tmp_path / part / "prompts.jsonl").unlink()
    again = load_scenario(str(folder / "scenario.yaml"))
    texts = [Path(again.folder, name).read_text() for name in again.workload.prompts]
    assert texts == [PROMPT.replace("hello", part) for part in ("one", "two")]
    assert again.model_copy(update={"workload": scenario.workload, "folder": "."}) == (
        scenario.model_copy(update={"folder": "."})
    )


def test_the_digest_notices_a_prompt_that_changed(file: Path, tmp_path: Path) -> None:
    before = digest(freeze(load_scenario(str(file))))
    assert digest(freeze(load_scenario(str(file)))) == before
    (tmp_path / "two" / "prompts.jsonl").write_text(PROMPT)
    assert digest(freeze(load_scenario(str(file)))) != before


def test_a_folder_is_gone_on_with_by_the_same_comparison_alone(tmp_path: Path) -> None:
    folder, files = tmp_path / "run", {"scenario.yaml": b"version: 1\n"}
    open_folder(folder, manifest(), files)
    open_folder(folder, manifest(repeats=5, command="again"), files)
    with pytest.raises(FolderError, match="another side facts"):
        open_folder(folder, manifest(side_facts={"plain": {}, "tree": {}}), files)
    with pytest.raises(FolderError, match="another scenario"):
        open_folder(folder, manifest(scenario={"name": "small", "sha256": "1"}), files)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FolderError, match="not empty"):
        open_folder(tmp_path, manifest(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = manifest(incomplete=("tree/1: the server ended",), files={"raw/x": "0"})
    made.write(tmp_path)
    assert Manifest.read(tmp_path) == made


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"kind": "run"}', '{"colour": "blue"}', '{"sides": ["../out"], "incomplete": []}'],
)
def test_what_is_no_manifest_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(FolderError, match=r"manifest\.json: not a manifest"):
        Manifest.read(tmp_path)


def test_only_runs_that_ended_are_whole(tmp_path: Path) -> None:
    assert not is_whole(tmp_path, "tree", 0)
    path = raw_folder(tmp_path, "tree", 0) / "run.json"
    path.parent.mkdir(parents=True)
    for text, whole in (
        ('{"complete": true, "num_errors": {}}', True),
        ('{"complete": true, "num_errors": {"http_500": 1}}', False),
        ('{"complete": false, "num_errors": {}}', False),
        ("{", False),
    ):
        path.write_text(text)
        assert is_whole(tmp_path, "tree", 0) == whole


def test_runs_that_ended_early_are_named_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    open_folder(folder, manifest(), {"scenario.yaml": b""})
    for repeat, text in ((0, '{"complete": false, "reason": "interrupted"}'), (1, None)):
        raw = raw_folder(folder, "tree", repeat)
        raw.mkdir(parents=True)
        if text is not None:
            (raw / "run.json").write_text(text)
    raw_folder(folder, "plain", 0).mkdir(parents=True)
    (raw_folder(folder, "plain", 0) / "run.json").write_text('{"complete": true}')
    found = manifest().as_of_now(folder).incomplete
    assert found == ("tree/0: interrupted", "tree/1: it was killed")


def test_a_folder_that_is_gone_on_with_keeps_what_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = manifest(created_at="2026-01-01T00:00:00+00:00", files={"raw/x": "0"})
    open_folder(folder, first, {})
    again = open_folder(folder, manifest(repeats=3), {})
    assert (again.created_at, again.files, again.repeats) == (first.created_at, first.files, 3)


@pytest.mark.parametrize(("begun", "repeats"), [(None, 1), (0, 1), (1, 2), (2, 3)])
def test_repeats_that_were_begun_are_not_left_out(
    tmp_path: Path, begun: int | None, repeats: int
) -> None:
    folder = tmp_path / "run"
    open_folder(folder, manifest(repeats=5), {})
    if begun is not None:
        raw_folder(folder, "tree", begun).mkdir(parents=True)
    assert open_folder(folder, manifest(repeats=1), {}).repeats == repeats
    assert Manifest.read(folder).repeats == repeats


def test_what_killed_runs_left_becomes_known_and_nothing_else(tmp_path: Path) -> None:
    """One run ended and was changed since; one was killed while it replaced an older one."""
    folder = tmp_path / "run"
    open_folder(folder, manifest(), {"scenario.yaml": b""})
    for side, names in (("plain", ("requests.jsonl", "run.json")), ("tree", ("requests.jsonl",))):
        raw_folder(folder, side, 0).mkdir(parents=True)
        for name in names:
            (raw_folder(folder, side, 0) / name).write_text('{"complete": true}')
    before = manifest().as_of_now(folder)
    (raw_folder(folder, "plain", 0) / "requests.jsonl").write_text("changed")
    killed = raw_folder(folder, "tree", 0)
    (killed / "requests.jsonl").rename(killed / "requests-0.jsonl")
    after = before.with_killed_runs(folder)
    ours = "raw/plain/0/requests.jsonl"
    assert after.files[ours] == before.files[ours]
    assert after.files.keys() - before.files.keys() == {"raw/tree/0/requests-0.jsonl"}
    assert before.files.keys() - after.files.keys() == {"raw/tree/0/requests.jsonl"}
    assert after.incomplete == ("tree/0: it was killed",)


def test_files_are_hashed_where_they_lie(tmp_path: Path) -> None:
    open_folder(tmp_path / "run", manifest(), {"scenario.yaml": b"", "inputs/a.jsonl": b"{}\n"})
    raw = raw_folder(tmp_path / "run", "plain", 0)
    raw.mkdir(parents=True)
    (raw / "requests.jsonl").write_text("")
    found = manifest().as_of_now(tmp_path / "run").files
    assert list(found) == ["inputs/a.jsonl", "raw/plain/0/requests.jsonl", "scenario.yaml"]
    assert all(len(json.loads(json.dumps(one))) == 64 for one in found.values())


def test_a_package_in_somebody_elses_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True)
    module = tmp_path / "folder.py"
    module.write_text("")
    monkeypatch.setattr(folder, "__file__", str(module))
    assert folder._commit() is None
    subprocess.run(["git", "-C", str(tmp_path), "add", "folder.py"], check=True)
    assert folder._commit() is not None, "control: now it is of that repository"
