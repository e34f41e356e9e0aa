"""What counts as a divergence, and how the check ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from specstack.cli import main
from specstack_serving import lossless
from specstack_serving.generate import Generation, RequestRefused
from specstack_serving.launch import ServerFailed
from specstack_serving.lossless import Difference, Report, _accept_length, _differences

SPECS = Path(__file__).parents[2] / "dsl" / "specs"


def answer(ids: list[int], gap: float = 1.0, rounds: int = 1) -> Generation:
    """Tokens `ids`; at every position the runner-up is the token plus 100, `gap` nats behind."""
    tops = [[[-0.1, i, None], [-0.1 - gap, i + 100, None]] for i in ids]
    return Generation(tuple(ids), {"output_top_logprobs": tops, "spec_verify_ct": rounds})


def differences(plain: Generation, speculative: Generation) -> list[Difference]:
    return list(_differences(["p"], [plain], [speculative], 1e-4))


def test_equal_outputs_have_no_difference() -> None:
    assert differences(answer([1, 2]), answer([1, 2])) == []


@pytest.mark.parametrize(("gap", "near_tie"), [(5e-5, True), (0.0, True), (2e-4, False)])
def test_the_gap_of_plain_decoding_decides(gap: float, near_tie: bool) -> None:
    [found] = differences(answer([1, 2, 3], gap), answer([1, 102, 9]))
    assert (found.position, found.plain_token, found.speculative_token) == (1, 2, 102)
    assert found.gap == pytest.approx(gap)
    assert found.near_tie is near_tie


def test_only_the_runner_up_can_tie() -> None:
    """Control: a tie of the two best tokens does not excuse a third one."""
    [found] = differences(answer([1, 2], gap=1e-6), answer([1, 55]))
    assert found.gap is None
    assert not found.near_tie


def test_of_two_equal_tokens_either_may_be_listed_first() -> None:
    plain = answer([1, 2], gap=0.0)
    plain.meta["output_top_logprobs"][1].reverse()
    [found] = differences(plain, answer([1, 102]))
    assert found.near_tie


@pytest.mark.parametrize(
    ("plain", "speculative", "tokens"),
    [([1, 2], [1, 2, 3], (None, 3)), ([1, 2, 3], [1, 2], (3, None)), ([], [4], (None, 4))],
)
def test_an_output_that_ends_early_diverges(
    plain: list[int], speculative: list[int], tokens: tuple[int | None, int | None]
) -> None:
    [found] = differences(answer(plain, 0.0), answer(speculative, 0.0))
    assert (found.plain_token, found.speculative_token) == tokens
    assert found.position == min(len(plain), len(speculative))
    assert not found.near_tie


def test_a_report_diverges_when_anything_but_ties_differs() -> None:
    tie, real = Difference("a", 0, 1, 2, 0.0, True), Difference("b", 0, 1, 2, 0.5, False)
    for found, diverged in (((), False), ((tie,), False), ((tie, real), True)):
        assert Report(1, 2, 3, 1.0, found).diverged is diverged


def test_accept_length_counts_tokens_per_round_without_the_prefills() -> None:
    assert _accept_length([answer([1] * 7, rounds=2), answer([1] * 3, rounds=2)]) == 2.0
    assert _accept_length([answer([1], rounds=0)]) == 1.0


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}\n')
    return path


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces servers; what each gives is under "plain" and "speculative"."""
    given: dict[str, Any] = {"plain": [answer([1, 2])] * 2, "speculative": [answer([1, 2])] * 2}
    order: list[str] = []

    @contextmanager
    def server(plan: Any, log: Path) -> Iterator[str]:
        assert plan.target.dtype == "float32"
        order.append("speculative" if plan.speculates else "plain")
        yield "url"

    def generate(*args: Any, **kwargs: Any) -> Any:
        result = given[order[-1]]
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(lossless, "running_server", server)
    monkeypatch.setattr(lossless, "generate", generate)
    monkeypatch.setattr(lossless, "chat_ids", lambda folder, prompts: [[1]] * len(prompts))
    monkeypatch.setattr(lossless, "prepare", _plan)
    given["order"] = order
    return given


def _plan(pipeline: Path, overrides: tuple[str, ...]) -> Any:
    from specstack.plan import plan_file

    return plan_file(pipeline, overrides)


def run(prompts: Path, *options: str, spec: str = "quickstart.yaml") -> int:
    arguments = ["lossless", str(SPECS / spec), "--prompts", str(prompts), *options]
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("speculative", "code", "said"),
    [
        ([answer([1, 2])] * 2, 0, "identical, 2 prompts"),
        ([answer([1, 2]), answer([1, 102])], 1, "DIVERGED"),
        ([answer([1, 2]), answer([1])], 1, "DIVERGED"),
    ],
)
def test_the_exit_code_says_whether_anything_diverged(
    answers: dict[str, Any], prompts: Path, capsys: pytest.CaptureFixture[str],
    speculative: list[Generation], code: int, said: str,
) -> None:  # fmt: skip
    answers["speculative"] = speculative
    assert run(prompts) == code
    assert said in capsys.readouterr().out
    assert answers["order"] == ["plain", "speculative"]


def test_a_near_tie_is_reported_and_no_failure(
    answers: dict[str, Any], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers["plain"] = [answer([1, 2], 1e-6)] * 2
    answers["speculative"] = [answer([1, 102])] * 2
    assert run(prompts, "--concurrency", "4") == 0
    assert "concurrency 4: identical but for 2 near-ties" in capsys.readouterr().out


def test_the_json_report_is_standard_json(
    answers: dict[str, Any], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers["speculative"] = [answer([1, 2]), answer([1])]
    assert run(prompts, "--format", "json") == 1

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    reports = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [r["diverged"] for r in reports] == [True, True]
    assert reports[0]["differences"][0]["gap"] is None


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (ServerFailed("not ready after 300 s\nthe tail"), "not ready after 300 s\nthe tail"),
        (RequestRefused("400: too long"), "400: too long"),
        (httpx.ReadError("gone"), "the server ended during a request: ReadError('gone')"),
    ],
)
def test_a_failing_server_ends_the_check_with_its_words(
    answers: dict[str, Any], prompts: Path, capsys: pytest.CaptureFixture[str],
    failure: Exception, said: str,
) -> None:  # fmt: skip
    answers["speculative"] = failure
    assert run(prompts) == 1
    assert f"Error: {said}\n" in capsys.readouterr().err


def test_a_pipeline_without_drafts_is_nothing_to_compare(
    answers: dict[str, Any], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompts, spec="plain.yaml") == 1
    assert "drafts nothing: there is nothing to compare" in capsys.readouterr().err


def test_bad_prompts_are_refused_before_any_server(
    answers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "x"}\n{}\n')
    assert run(path) == 1
    assert (
        f"{path}:2: expected an object with `messages`, `turns` or `prompt`"
        in capsys.readouterr().err
    )
    assert answers["order"] == []
