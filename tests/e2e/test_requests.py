"""What a client sees of one speculative server: streaming, opt-out, refusals, seeds, metrics."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cases import CODE, PROMPTS, REPEAT, STORY, body
from harness import Serve

from specstack.cli import main
from specstack.training.answers import read_answers

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def url(serve: Serve) -> Iterator[str]:
    with serve("quickstart.yaml", "budget={kind: fixed, draft_budget: 7}") as address:
        yield address


def generate(url: str, text: str, params: dict[str, Any], **extra: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/generate", json=body(text, params, **extra), timeout=120.0)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def metrics(url: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if match := re.match(r"specstack_(\w+)\{(.*)\} ([0-9.e+]+)$", line):
            name, labels, value = match.groups()
            label = re.search(r'(?:position|drafter)="(\w+)"', labels)
            key = f"{name}[{label.group(1)}]" if label else name
            found[key] = found.get(key, 0.0) + float(value)
    return found


def test_openai_streaming_gives_the_same_text(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    request: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": REPEAT}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.model == MODEL
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40


def test_a_stop_string_inside_an_accepted_run_cuts_the_stream(url: str) -> None:
    with httpx.stream(
        "POST",
        f"{url}/generate",
        json=body(REPEAT, {"stop": "yellow"}, stream=True),
        timeout=60.0,
    ) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    last = json.loads(lines[-1])
    assert "yellow" not in last["text"]
    assert last["meta_info"]["finish_reason"]["matched"] == "yellow"
    assert last["meta_info"]["spec_verify_ct"] > 0


def test_n_answers_are_sampled_apart(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": STORY}],
        temperature=1.0,
        max_tokens=24,
        n=3,
    )
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_a_seed_repeats_itself_and_another_does_not(url: str) -> None:
    params = {"temperature": 1.0, "sampling_seed": 11, "max_new_tokens": 32}
    first = generate(url, CODE, params)["output_ids"]
    assert generate(url, CODE, params)["output_ids"] == first
    off = generate(url, CODE, {**params, "custom_params": {"specstack": {"speculate": False}}})
    assert off["output_ids"] == first
    assert generate(url, CODE, {**params, "sampling_seed": 12})["output_ids"] != first


def test_temperature_is_honoured(url: str) -> None:
    hot = generate(url, CODE, {"temperature": 1.5, "max_new_tokens": 24})["text"]
    assert hot != generate(url, CODE, {"max_new_tokens": 24})["text"]
    cold = generate(url, CODE, {"temperature": 1.5, "top_k": 1, "max_new_tokens": 24})["text"]
    assert cold == generate(url, CODE, {"max_new_tokens": 24})["text"]


@pytest.mark.parametrize("how", ["extra_body", "native"])
def test_a_request_may_opt_out_and_is_counted(url: str, how: str) -> None:
    before = metrics(url)
    if how == "native":
        request = body(REPEAT, {"max_new_tokens": 16})
        request["specstack"] = {"speculate": False}
        meta = httpx.post(f"{url}/generate", json=request, timeout=60.0).json()["meta_info"]
        assert meta["spec_verify_ct"] >= meta["completion_tokens"] - 1
    else:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": REPEAT}],
            temperature=0,
            max_tokens=16,
            extra_body={"specstack": {"speculate": False}},
        )
    after = metrics(url)
    opted = after["opted_out_requests_total"] - before.get("opted_out_requests_total", 0.0)
    assert opted >= 15
    drafts = "spec_decode_num_draft_tokens_total"
    assert after.get(drafts, 0.0) == before.get(drafts, 0.0)


MATH = (
    "A baker sells 12 loaves a day at 3 dollars each. He pays 8 dollars a day for flour. "
    "How many dollars does he keep in a week of 5 days?"
)


def test_the_packaged_head_drafts_what_the_model_says(url: str) -> None:
    """A text that the drafter cannot have seen, and does not repeat itself."""

    def tokens_per_round(**more: Any) -> float:
        meta = generate(url, MATH, {"max_new_tokens": 64, **more})["meta_info"]
        return float((meta["completion_tokens"] - 1) / meta["spec_verify_ct"])

    before = metrics(url)
    assert tokens_per_round() > 1.6
    after = metrics(url)
    name = "spec_decode_num_accepted_tokens_per_drafter_total"

    def accepted(key: str) -> float:
        return after[key] - before.get(key, 0.0)

    assert accepted(f"{name}[block]") > 0.5 * accepted("spec_decode_num_accepted_tokens_total")
    off = {"custom_params": {"specstack": {"speculate": False}}}
    assert tokens_per_round(**off) <= 1.0, "control: one token a round without drafts"


def test_metrics_are_consistent(url: str) -> None:
    generate(url, REPEAT, {})
    found = metrics(url)
    drafts = found["spec_decode_num_draft_tokens_total"]
    accepted = found["spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted <= drafts
    for kind, total in (("draft", drafts), ("accepted", accepted)):
        name = f"spec_decode_num_{kind}_tokens_per_pos_total"
        per_position = [v for k, v in found.items() if k.startswith(f"{name}[")]
        assert sum(per_position) == total
    for position in range(8):
        at = f"_per_pos_total[{position}]"
        accepted_here = found.get(f"spec_decode_num_accepted_tokens{at}", 0.0)
        assert accepted_here <= found.get(f"spec_decode_num_draft_tokens{at}", 0.0)
    assert found["verify_seconds_count"] == found["rounds_total"]


def test_server_info_names_the_plan(url: str) -> None:
    state = httpx.get(f"{url}/server_info").json()["internal_states"][0]
    assert re.fullmatch(r"[0-9a-f]{64}", state["specstack"]["plan_hash"])
    assert state["specstack"]["drafter"] == "merge"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_logit_processor": "x"}, "custom logit processors"),
        ({"lora_path": "x"}, "LoRA"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"sampling_params": {"beam_width": 2}}, "beam search"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 7}}, "top_p"),
        ({"sampling_params": {"logit_bias": {"99999999": 1}}}, "logit_bias"),
        ({"specstack": {"speculate": "maybe"}}, "true or false"),
        ({"specstack": "off"}, "speculate"),
    ],
)
def test_what_cannot_work_is_refused_and_the_server_stays_up(
    url: str, change: dict[str, Any], message: str
) -> None:
    response = httpx.post(f"{url}/generate", json={"text": "hello", **change}, timeout=30.0)
    assert response.status_code == 400
    assert message in response.text
    assert generate(url, "hello", {"max_new_tokens": 2})["meta_info"]["completion_tokens"] == 2


def test_aborted_requests_free_their_slots(url: str) -> None:
    def abandon() -> None:
        request = body(STORY, {"max_new_tokens": 2000, "ignore_eos": True}, stream=True)
        with httpx.stream("POST", f"{url}/generate", json=request, timeout=60.0) as response:
            for _ in zip(range(3), response.iter_lines(), strict=False):
                pass

    threads = [threading.Thread(target=abandon) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(60):
        load = httpx.get(f"{url}/v1/loads", timeout=30.0).json()["loads"][0]
        if load["num_running_reqs"] == 0:
            break
        time.sleep(0.5)
    assert load["num_running_reqs"] == 0
    assert generate(url, CODE, {"max_new_tokens": 8})["meta_info"]["completion_tokens"] == 8


def test_regenerated_answers_are_what_the_target_emits(url: str, tmp_path: Path) -> None:
    """Text and ids: the prompt through the server's chat template, and the greedy continuation."""
    out = tmp_path / "answers.jsonl"
    options = ["--url", f"{url}/v1", "--num", "4", "--max-tokens", "48", "--concurrency", "1"]
    assert main(["draft", "regenerate", str(PROMPTS), "-o", str(out), *options]) == 0
    answers = list(read_answers(out))
    assert len(answers) == 4
    for answer in answers:
        assert answer.input_ids is not None
        assert answer.output_ids is not None
        prompt, text = (message["content"] for message in answer.messages)
        native = generate(url, prompt, {"max_new_tokens": 48})
        assert list(answer.output_ids) == native["output_ids"]
        assert answer.completion_tokens == len(answer.output_ids)
        assert answer.prompt_tokens == len(answer.input_ids)
        assert answer.prompt_tokens == native["meta_info"]["prompt_tokens"]
        assert text == native["text"]
    meta = json.loads((tmp_path / "answers.meta.json").read_text())
    assert meta["settings"]["model"] == MODEL
    assert meta["runs"][0]["server"]["specstack"]["drafter"] == "merge"


def test_an_empty_batch_of_odd_bodies_is_survived(url: str) -> None:
    for content in (b"", b"{", b'{"specstack": {', b"[]", b"\xff\xfe"):
        response = httpx.post(
            f"{url}/generate", content=content, headers={"content-type": "application/json"}
        )
        assert 400 <= response.status_code < 500
    assert httpx.get(f"{url}/health").status_code == 200
