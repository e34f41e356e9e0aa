"""`specstack draft eval`: its files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specstack.cli import main
from specstack.evaluation.cli import evaluate
from specstack.training.answers import read_answers, to_line
from specstack.training.answers_meta import Meta, Settings, write_meta
from specstack.training.texts import is_holdout
from specstack.training.tiny import save_answers, save_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its answers, and a pipeline of n-grams."""
    folder = tmp_path_factory.mktemp("evaluation")
    save_target(folder / "target")
    save_answers(folder / "answers.jsonl", folder / "target", num_answers=4, num_output=30)
    write_pipeline(folder / "p.yaml", folder / "target")
    return folder


def write_pipeline(file: Path, target: Path, **sections: Any) -> Path:
    text = {
        "version": 1, "target": str(target), "drafter": "ngram",
        "tree": {"kind": "best_first", "depth": 4}, "verify": "sample_and_walk",
        "budget": {"kind": "fixed", "draft_budget": 6}, "engine": {"device": "cpu"}, **sections,
    }  # fmt: skip
    file.write_text(json.dumps(text))
    return file


def run(*args: object) -> Result:
    return CliRunner().invoke(evaluate, [str(arg) for arg in args])


def meta(file: Path, **fields: Any) -> None:
    settings = {
        "model": "target", "prompts_sha256": "0", "max_tokens": 30, "temperature": 0.0,
        "top_p": 1.0, "seed": None, "token_ids": True, **fields,
    }  # fmt: skip
    write_meta(file, Meta(Settings(**settings), "prompts.jsonl", ()))


def copy_of(folder: Path, to: Path, **changes: Any) -> Path:
    lines = [{**vars(a), **changes} for a in read_answers(folder / "answers.jsonl")]
    to.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    return to


def test_it_writes_a_report_with_all_configurations(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run(folder / "p.yaml", "--answers", folder / "answers.jsonl", "-o", out, "--tree",
                "chain", "--tree", "best_first", "--budget", 2, "--budget", 6)  # fmt: skip
    assert found.exit_code == 0, found.output
    report = json.loads((out / "report.json").read_text())
    names = [c["name"] for c in report["configurations"]]
    assert names == ["chain 2", "chain 4", "best_first 2", "best_first 6"]
    assert report["accept_length_counts_the_bonus_token"]
    assert len({c["plan_hash"] for c in report["configurations"]}) == 4
    facts = report["provenance"]
    assert facts["data_sha256"].keys() == {str(folder / "answers.jsonl")}
    assert facts["versions"].keys() >= {"specstack", "torch", "transformers"}
    assert report["data_sets"] == {"answers": {"sequences": 4, "answer_tokens": 120}}
    for one in report["configurations"]:
        measures = one["data_sets"]["all"]
        assert measures["accept_length"]["value"] >= 1
        assert one["tree_efficiency"] <= 1
        assert one["context_len"]
    text = (out / "report.md").read_text()
    assert text.count("bonus included") >= 4
    assert "were not compared with the target's" in text
    assert {p.name for p in out.glob("*.png")} == {
        "accept_length.png", "alpha.png", "context.png", "calibration.png",
    }  # fmt: skip
    assert "bonus included" in found.output


def test_without_trees_and_budgets_it_is_the_pipelines_own(folder: Path, tmp_path: Path) -> None:
    rows = [{"max_batch": 2, "draft_budget": 5, "min_survival": 0.1},
            {"max_batch": 8, "draft_budget": 3}]  # fmt: skip
    file = write_pipeline(tmp_path / "p.yaml", folder / "target",
                          budget={"kind": "table", "rows": rows})  # fmt: skip
    for load, name in ((1, "best_first 5 above 0.1"), (8, "best_first 3")):
        found = run(file, "--answers", folder / "answers.jsonl", "-o", tmp_path / "o", "--load",
                    load, "--format", "json")  # fmt: skip
        assert found.exit_code == 0, found.output
        names = [c["name"] for c in json.loads(found.stdout)["configurations"]]
        assert names == [name, "chain 4"]
    found = run(file, "--answers", folder / "answers.jsonl", "-o", tmp_path / "o", "--load", 9)
    assert found.exit_code == 2
    assert "its policy drafts nothing at a load of 9: give --load or --budget" in found.output


def test_answers_are_cut_where_the_target_goes_on_otherwise(folder: Path, tmp_path: Path) -> None:
    answers = [vars(answer) for answer in read_answers(folder / "answers.jsonl")]
    ids = list(answers[1]["output_ids"])
    ids[10] = (ids[10] + 1) % 128
    answers[1]["output_ids"] = ids
    file = tmp_path / "wrong.jsonl"
    file.write_bytes(b"".join(json.dumps(a).encode() + b"\n" for a in answers))
    found = run(folder / "p.yaml", "--answers", file, "-o", tmp_path / "o", "--check-greedy",
                "--format", "json")  # fmt: skip
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["data_sets"]["wrong"]["answer_tokens"] == 100
    [note] = report["notes"]
    assert note.startswith("checked against the target: 100 of 120 answer tokens (83.3%)")
    assert "1 answers are cut" in note


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_ids": None}, "the answer to line 1 has no token ids, which a replay needs"),
        ({"output_ids": [5, 128]}, "token 128 of the answer to line 1 is not one of the target's"),
        ({"output_ids": [5]}, "no answer of 2 tokens or more in"),
        ({"input_ids": []}, "the answer to line 1 has an empty prompt"),
    ],
)
def test_unusable_answers_are_named(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    file = copy_of(folder, tmp_path / "a.jsonl", **changes)
    found = run(folder / "p.yaml", "--answers", file, "-o", tmp_path / "o")
    assert (found.exit_code, message in found.output) == (2, True), found.output
    assert not (tmp_path / "o").exists()


def test_answers_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    file = copy_of(folder, tmp_path / "a.jsonl")
    meta(file, model="other")
    found = run(folder / "p.yaml", "--answers", file, "-o", tmp_path / "o")
    assert found.exit_code == 2
    assert f"{file} was made by other, the pipeline's target is target" in found.output
    meta(file)
    assert run(folder / "p.yaml", "--answers", file, "-o", tmp_path / "o").exit_code == 0


def test_sampled_answers_need_a_rule_that_takes_them(folder: Path, tmp_path: Path) -> None:
    file = copy_of(folder, tmp_path / "a.jsonl")
    meta(file, temperature=0.8)
    greedy = write_pipeline(tmp_path / "p.yaml", folder / "target", verify="greedy")
    found = run(greedy, "--answers", file, "-o", tmp_path / "o")
    assert found.exit_code == 2
    assert "verify rule greedy takes no sampled answers" in found.output
    found = run(folder / "p.yaml", "--answers", file, "-o", tmp_path / "o", "--bound", 3)
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "o/report.json").read_text())
    assert "the answers were sampled at temperature 0.8" in report["notes"][0]
    assert "bounds: means over 3 positions" in report["notes"]
    for one in report["configurations"]:
        depth = min(one["draft_budget"], 4)
        assert 1 < one["bound"] <= 1 + depth


def test_a_pipeline_without_speculation_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(json.dumps({"version": 1, "target": str(folder / "target"), "drafter": "none"}))
    found = run(file, "--answers", folder / "answers.jsonl", "-o", tmp_path / "o")
    assert found.exit_code == 2
    assert "the drafter is none, so that there is nothing to evaluate" in found.output


def test_wrong_options_are_named(folder: Path, tmp_path: Path) -> None:
    file, answers = folder / "p.yaml", folder / "answers.jsonl"
    found = run(file, "-o", tmp_path / "o")
    assert (found.exit_code, "give either --answers or --prompts" in found.output) == (2, True)
    found = run(file, "--answers", answers, "-o", tmp_path / "o", "--tree", "chian")
    assert found.exit_code == 2
    assert "--tree chian: expected one of chain, static, beam, expand, best_first" in found.output
    assert "did you mean 'chain'?" in found.output


def save_tokenizer(folder: Path, template: str | None) -> None:
    """Words w3, w4, .. are tokens 3, 4, .."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 128)}}
    tokens = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="[UNK]")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)


def test_prompts_are_answered_by_the_target_first(tmp_path: Path) -> None:
    """With sampling, too; and what is then replayed is what --live shows."""
    target, prompts = tmp_path / "target", tmp_path / "prompts.jsonl"
    save_target(target)
    prompts.write_text("".join(
        json.dumps({"prompt": f"w{i} w{i + 9} w{i}", "source": "ab"[i % 2]}) + "\n"
        for i in range(3, 7)
    ))  # fmt: skip
    file = write_pipeline(tmp_path / "p.yaml", target)
    command = [file, "--prompts", prompts, "-o", tmp_path / "o", "--max-tokens", 12]
    refused = run(*command)
    assert (refused.exit_code, "has no tokenizer, use --answers" in refused.output) == (2, True)
    save_tokenizer(target, None)
    refused = run(*command)
    assert (refused.exit_code, "has no chat template: use --answers" in refused.output) == (2, True)
    save_tokenizer(target, "{% for m in messages %}{{ m['content'] }} {% endfor %}w1")
    reports = []
    for extra in ([], ["--temperature", 0.7], ["--temperature", 0.7, "--live"]):
        found = run(*command, *extra, "--format", "json")
        assert found.exit_code == 0, found.output
        reports.append(json.loads(found.stdout))
        assert {n: d["sequences"] for n, d in reports[-1]["data_sets"].items()} == {"a": 2, "b": 2}
    greedy, sampled, live = (report["configurations"][0]["data_sets"] for report in reports)
    assert sampled == live
    assert greedy != sampled
    assert reports[1]["configurations"][0]["bound"] is None, "not asked for"


def test_an_interrupt_writes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specstack.evaluation.evaluate.run_batch", interrupt)
    found = run(folder / "p.yaml", "--answers", folder / "answers.jsonl", "-o", tmp_path / "o")
    assert found.exit_code == 130
    assert not (tmp_path / "o").exists()


def test_sources_name_the_data_sets(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(
        json.dumps({"prompt": "-", **({"source": s} if s else {})}) + "\n"
        for s in ("maths", None, "code", "maths")
    ))  # fmt: skip
    found = run(folder / "p.yaml", "--answers", folder / "answers.jsonl", "-o", tmp_path / "o",
                "--sources", prompts, "--format", "json")  # fmt: skip
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    sizes = {name: d["sequences"] for name, d in report["data_sets"].items()}
    assert sizes == {"maths": 2, "answers": 1, "code": 1}
    measured = report["configurations"][0]["data_sets"]
    assert list(measured) == ["maths", "answers", "code", "all"]
    parts = [measured[name]["rounds"] for name in sizes]
    assert sum(parts) == measured["all"]["rounds"]


def test_drafters_of_a_merge_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """Long matches beside all of them: what the first proposes, the second does, too."""
    of = [{"kind": "ngram", "min_match": 8}, {"kind": "ngram", "min_match": 1}]
    file = write_pipeline(tmp_path / "p.yaml", folder / "target",
                          drafter={"kind": "merge", "of": of})  # fmt: skip
    periodic = copy_of(folder, tmp_path / "periodic.jsonl", output_ids=[5, 6, 7] * 10)
    out = tmp_path / "o"
    found = run(file, "--answers", periodic, "--answers", folder / "answers.jsonl", "-o", out)
    assert found.exit_code == 0, found.output
    report, text = json.loads((out / "report.json").read_text()), (out / "report.md").read_text()
    assert "## Drafters of the merge" in text
    for one in report["configurations"]:
        assert list(one["data_sets"]) == ["periodic", "answers", "all"]
        for data_set, measures in one["data_sets"].items():
            assert list(measures["drafters"]) == ["ngram_0", "ngram_1"]
            long, every = measures["drafters"].values()
            assert every["drafts"] == round(measures["drafts_per_round"] * measures["rounds"])
            assert every["accept_rate"] == measures["accept_rate"]
            assert every["share_of_right"]["value"] == 1
            assert (long["right"] > 0) == (data_set != "answers"), "random tokens recur alone"
            row = f"| {one['name']} | {data_set} | ngram_0 | {long['drafts']} | {long['right']} |"
            assert row in text
        for number in ("drafts", "right"):
            *parts, whole = (m["drafters"]["ngram_0"][number] for m in one["data_sets"].values())
            assert sum(parts) == whole > 0


def test_without_a_merge_there_is_no_table_of_drafters(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    found = run(folder / "p.yaml", "--answers", folder / "answers.jsonl", "-o", out)
    assert found.exit_code == 0, found.output
    report = json.loads((out / "report.json").read_text())
    assert [m["drafters"] for c in report["configurations"] for m in c["data_sets"].values()] == [
        {}, {},
    ]  # fmt: skip
    assert "Drafters of the merge" not in (out / "report.md").read_text()


def test_a_head_is_judged_on_what_it_was_not_trained_on(folder: Path, tmp_path: Path) -> None:
    keys = [answer.prompt_sha256 for answer in read_answers(folder / "answers.jsonl")]
    expected = sum(is_holdout(key, 0.5) for key in keys)
    assert 0 < expected < len(keys)
    command = [folder / "p.yaml", "--answers", folder / "answers.jsonl", "-o", tmp_path / "o"]
    found = run(*command, "--holdout-share", 0.5, "--format", "json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["data_sets"]["answers"]["sequences"] == expected
    assert report["provenance"]["holdout_share"] == 0.5
    found = run(*command, "--holdout-share", 1e-9)
    assert found.exit_code == 2
    assert "no answer of 2 tokens or more that a holdout of 1e-09 keeps in" in found.output


def test_the_command_is_in_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "eval", "--help"]) == 0
    assert "PIPELINE.yaml" in capsys.readouterr().out


def test_a_round_trip_of_the_answers_used_here(folder: Path) -> None:
    lines = (folder / "answers.jsonl").read_bytes().splitlines(keepends=True)
    assert [to_line(a) for a in read_answers(folder / "answers.jsonl")] == lines
