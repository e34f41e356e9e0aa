"""Trained heads on the real server: they change nothing, and accept what evaluation says.

The target is tiny and random; every head is overfitted to a few of its answers, so that it drafts
them well only if serving hands it exactly the features, positions and KV it was trained on.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from harness import Serve
from laws import same_law
from safetensors.torch import load_file, save_file

from specstack.cli import main
from specstack.training import tiny
from specstack.training.answers import Answer, read_answers

HIDDEN = {"source": "hidden", "target_layers": [1, 2]}
KV = {"source": "kv", "kv_layers": [2], "kv_mix": "paired"}
MARKOV = {"kind": "markov", "rank": 16}
HEADS: dict[str, dict[str, Any]] = {
    "block": {"form": "block", "context": HIDDEN, "conditioning": MARKOV, "draft_vocab_size": 100},
    "block_seeded": {"form": "block", "slots": "seeded", "context": {**KV, **HIDDEN,
                     "source": "hybrid", "fusion": "sum"},
                     "conditioning": {"kind": "gru", "rank": 16}},
    "block_refresh": {"form": "block", "context": KV, "conditioning": {"kind": "refresh"}},
    "autoregressive": {"form": "autoregressive", "context": HIDDEN},
    "autoregressive_kv": {"form": "autoregressive", "context": {**KV, "kv_layers": [1, 3],
                          "kv_mix": "linear"}},
    "autoregressive_gated": {"form": "autoregressive", "context": {**KV, **HIDDEN,
                             "source": "hybrid", "fusion": "gated_delta"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    tiny.save_target(folder / "target")
    tiny.save_answers(folder / "answers.jsonl", folder / "target", num_output=32)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[Answer]:
    return list(read_answers(folder / "answers.jsonl"))


def train(folder: Path, name: str) -> Path:
    """Overfit a head; a few seconds on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    head = {"block_size": 4, "num_layers": 1, **HEADS[name]}
    run = folder / f"{name}.yaml"
    run.write_text(
        tiny.run_text(
            folder / "target", folder / "answers.jsonl", head, schedule={"max_steps": 150}
        )
    )
    assert main(["draft", "train", str(run), "-o", str(folder / name)]) == 0
    torch.set_num_threads(threads)
    return folder / name / "head"


def pipeline(folder: Path, drafter: dict[str, Any], tp: int = 1, **budget: Any) -> Path:
    sections = {
        "version": 1,
        "target": str(folder / "target"),
        "drafter": drafter,
        "tree": {"kind": "best_first", "depth": 3},
        "budget": budget or {"kind": "fixed", "draft_budget": 7},
        "engine": {
            "device": "cpu",
            "context_length": 256,
            "tp": tp,
            "args": {"skip_tokenizer_init": True, "chunked_prefill_size": 4},
        },
    }
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(sections))  # JSON is YAML
    return path


def evaluated(pipeline: Path, folder: Path) -> float:
    """Emitted tokens per round when the answers are replayed."""
    out = folder / "report"
    command = ["draft", "eval", str(pipeline), "--answers", str(folder / "answers.jsonl")]
    assert main([*command, "-o", str(out)]) == 0
    report = json.loads((out / "report.json").read_text())
    shutil.rmtree(out)
    tree = next(c for c in report["configurations"] if c["tree"]["kind"] == "best_first")
    value: float = tree["data_sets"]["all"]["as_served"]["value"]
    return value


def ask(url: str, answers: list[Answer], concurrency: int) -> tuple[list[tuple[int, ...]], float]:
    """The greedy outputs, and emitted tokens per round."""

    def one(answer: Answer) -> tuple[tuple[int, ...], int]:
        body = {
            "input_ids": list(answer.input_ids or ()),
            "sampling_params": {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 32},
        }
        reply = httpx.post(f"{url}/generate", json=body, timeout=120.0)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        return tuple(found["output_ids"]), found["meta_info"]["spec_verify_ct"]

    with ThreadPoolExecutor(concurrency) as pool:
        replies = list(pool.map(one, answers))
    rounds = sum(count for _, count in replies)
    return [ids for ids, _ in replies], sum(len(ids) - 1 for ids, _ in replies) / rounds


def shuffle(head: Path, into: Path) -> Path:
    """The same head with the values of every matrix in another order."""
    into.mkdir()
    (into / "config.json").write_text((head / "config.json").read_text())
    random = torch.Generator().manual_seed(0)
    weights = load_file(head / "model.safetensors")
    for name, value in weights.items():
        if value.is_floating_point() and value.dim() == 2:
            order = torch.randperm(value.numel(), generator=random)
            weights[name] = value.flatten()[order].reshape(value.shape).contiguous()
    save_file(weights, into / "model.safetensors")
    return into


def test_two_ranks_take_the_same_budget_although_their_clocks_differ(
    serve: Serve, folder: Path, answers: list[Answer]
) -> None:
    """Costs are measured when the server starts, by each rank; the first one's budget counts.

    Ranks with budgets of their own would verify trees of different widths, and hang.
    """
    block = {"kind": "block", "checkpoint": str(train(folder, "block_seeded"))}
    spec = pipeline(folder, block, tp=2, kind="goodput", choices=[0, 1, 3, 7])
    with serve(spec) as url:
        outputs, _ = ask(url, answers, 4)
        status = httpx.get(f"{url}/specstack/status", timeout=60.0).json()
    assert outputs == [answer.output_ids for answer in answers]
    assert status["costs"]["source"] == "measured"
    assert status["budget"]["reason"] in ("goodput", "hold", "off", "probe")


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_what_it_has_learnt_and_changes_nothing(
    serve: Serve, folder: Path, answers: list[Answer], name: str
) -> None:
    drafter = {"kind": HEADS[name]["form"], "checkpoint": str(train(folder, name))}
    spec = pipeline(folder, drafter)
    with serve(spec) as url:
        alone, accept_length = ask(url, answers, 1)
        crowded, crowded_length = ask(url, answers, 4)  # prompts now come from the prefix cache
    assert alone == crowded == [answer.output_ids for answer in answers]
    assert accept_length > 1.5
    assert crowded_length == pytest.approx(accept_length, abs=0.02)
    assert accept_length == pytest.approx(evaluated(spec, folder), abs=0.02)


def test_a_merge_is_lossless_and_a_shuffled_head_useless(
    serve: Serve, folder: Path, answers: list[Answer]
) -> None:
    head = shuffle(train(folder, "block"), folder / "shuffled")
    block = {"kind": "block", "checkpoint": str(head)}
    outputs = [answer.output_ids for answer in answers]
    with serve(pipeline(folder, block)) as url:
        alone, accept_length = ask(url, answers, 1)
    assert alone == outputs
    assert accept_length < 1.3, "control: what is accepted elsewhere has been learnt"
    merge = {"kind": "merge", "of": [block, {"kind": "ngram"}]}
    with serve(pipeline(folder, merge)) as url:
        assert ask(url, answers, 4)[0] == outputs


def test_two_ranks_draft_what_one_drafts(serve: Serve, folder: Path, answers: list[Answer]) -> None:
    """The head reads hidden states, KV heads and tables, which two ranks hold parts of."""
    block = {"kind": "block", "checkpoint": str(train(folder, "block_seeded"))}
    spec = pipeline(folder, block, tp=2)
    with serve(spec) as url:
        outputs, accept_length = ask(url, answers, 4)
    assert outputs == [answer.output_ids for answer in answers]
    assert accept_length == pytest.approx(evaluated(spec, folder), abs=0.02)


def drawn(folder: Path, tree: dict[str, Any], verify: str, checkpoint: Path) -> Path:
    """A pipeline whose drafts are drawn at random."""
    sections = json.loads(
        pipeline(
            folder, {"kind": "block", "checkpoint": str(checkpoint), "drafts": "drawn"}
        ).read_text()
    )
    sections |= {"tree": tree, "verify": verify, "budget": {"kind": "fixed", "draft_budget": 3}}
    path = folder / "drawn.yaml"
    path.write_text(json.dumps(sections))
    return path


def sample(
    url: str, prompt: tuple[int, ...], num: int, temperature: float, **custom: Any
) -> tuple[Counter[tuple[int, ...]], int]:
    """Joint counts of three tokens, and the rounds that they took."""
    params = {"temperature": temperature, "max_new_tokens": 3, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": {**params, "custom_params": custom}}

    def one(_: int) -> dict[str, Any]:
        reply = httpx.post(f"{url}/generate", json=body, timeout=120.0)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(one, range(num)))
    rounds = sum(reply["meta_info"]["spec_verify_ct"] for reply in replies)
    return Counter(tuple(reply["output_ids"]) for reply in replies), rounds


@pytest.mark.parametrize(
    ("tree", "verify"),
    [
        ({"kind": "chain", "depth": 3}, "block"),
        ({"kind": "static", "paths": [[0], [1], [0, 0]]}, "rejection"),
    ],
    ids=["chain_block", "static_rejection"],
)
def test_drawn_drafts_leave_the_law_as_it_is(
    serve: Serve, folder: Path, answers: list[Answer], tree: dict[str, Any], verify: str
) -> None:
    """Greedy outputs to the token; sampled ones as those of requests without drafts."""
    spec = drawn(folder, tree, verify, train(folder, "block"))
    prompt = answers[0].input_ids
    assert prompt
    with serve(spec) as url:
        outputs, accept_length = ask(url, answers, 4)
        speculated, rounds = sample(url, prompt, 500, 1.0)
        plain, plain_rounds = sample(url, prompt, 500, 1.0, specstack={"speculate": False})
        cooler, _ = sample(url, prompt, 500, 0.6, specstack={"speculate": False})
    assert outputs == [answer.output_ids for answer in answers]
    assert accept_length > 1.5
    assert rounds < 0.9 * plain_rounds, "drafts were accepted"
    assert same_law(speculated, plain) > 1e-3
    assert same_law(speculated, cooler) < 1e-6, "control: another law is noticed"
