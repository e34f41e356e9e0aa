"""What a plan may not contradict: every rule, its exact words, and its silence otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import specstack_dsl.parts as parts
from specstack.facts import HostFacts, ModelFacts
from specstack.head_rules import HEAD_RULES
from specstack.plan import Plan, compile
from specstack.plan_rules import PLAN_RULES
from specstack_dsl import Pipeline, PlanError, loads
from specstack_dsl.parts.best_first import BestFirst

CPU = HostFacts(accelerator="none", num_accelerators=0, memory_bytes=16 * 2**30, num_cpus=4)
GPU = replace(CPU, accelerator="nvidia", num_accelerators=2)
FACTS = ModelFacts(
    architecture="LlamaForCausalLM", num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=2,
    head_dim=8, vocab_size=1000, max_position_embeddings=8192, num_parameters=1_000_000,
)  # fmt: skip
HEAD = "version: 1\ntarget: org/m\n"
CASES: dict[str, tuple[str, HostFacts, dict[str, Any], str]] = {
    "cuda without an accelerator": (
        "engine: {device: cuda}\n", CPU, {},
        "f.yaml:3:18: engine.device: device is cuda, but this machine shows no accelerator: use cpu"
        " or auto, or check the driver and CUDA_VISIBLE_DEVICES",
    ),
    "more ranks than accelerators": (
        "engine: {tp: 4}\n", GPU, {},
        "f.yaml:3:14: engine.tp: tp is 4, but 2 accelerators are visible",
    ),
    "the CPU's attention on cuda": (
        "engine: {attention_backend: specstack_cpu}\n", GPU, {},
        "f.yaml:3:29: engine.attention_backend: specstack_cpu runs on cpu, but the device is cuda:"
        " use auto, triton or flashinfer",
    ),
    "cuda's attention on a CPU": (
        "engine: {attention_backend: triton}\n", CPU, {},
        "f.yaml:3:29: engine.attention_backend: triton runs on cuda, but the device is cpu:"
        " use auto",
    ),
    "graphs on a CPU": (
        "engine: {args: {cuda_graph_max_bs_decode: 8}}\n", CPU, {},
        "f.yaml:3:43: engine.args.cuda_graph_max_bs_decode: the device is cpu, which has no CUDA"
        " graphs: remove it",
    ),
    "captured verification": (
        "engine: {args: {cuda_graph_backend_decode: breakable}}\n", GPU, {},
        "f.yaml:3:44: engine.args.cuda_graph_backend_decode: drafter ngram verifies trees, whose"
        " steps are captured whole, but the value is breakable: use full, or remove it",
    ),
    "captured verification with one width": (
        "engine: {attention_backend: fa3, args: {cuda_graph_backend_decode: full}}\n", GPU, {},
        "f.yaml:3:68: engine.args.cuda_graph_backend_decode: drafter ngram verifies trees, whose"
        " mask is captured with engine.attention_backend triton or flashinfer, but it is fa3:"
        " change one",
    ),
    "captured verification behind the plan": (
        "engine: {args: {cuda_graph_config: {decode: {backend: full}}}}\n", GPU, {},
        "f.yaml:3:36: engine.args.cuda_graph_config: drafter ngram verifies trees, and its"
        " decode.backend overrides the plan's: use engine.args.cuda_graph_backend_decode",
    ),
    "a recurrent target": (
        "", GPU, {"is_recurrent": True},
        "f.yaml:2:9: target.model: org/m (LlamaForCausalLM) has layers with a recurrent state,"
        " which a rejected branch would leave corrupt; drafter ngram needs attention in all layers:"
        " choose another model, or set drafter: none",
    ),
    "a recurrent target on a CPU": (
        "drafter: none\n", CPU, {"is_recurrent": True},
        "f.yaml:2:9: target.model: org/m (LlamaForCausalLM) has layers with a recurrent state,"
        " which a rejected branch would leave corrupt; the device cpu needs attention in all"
        " layers: choose another model",
    ),
    "latent attention": (
        "", GPU, {"is_mla": True},
        "f.yaml:2:9: target.model: org/m (LlamaForCausalLM) keeps latent keys and values (MLA);"
        " drafter ngram supports plain KV caches only: choose another model, or set drafter: none",
    ),
    "a window shorter than the context": (
        "", CPU, {"sliding_window": 4096},
        "f.yaml:2:9: target.model: org/m has layers that see 4096 tokens, and drafter ngram needs"
        " layers that see all: set engine.context_length to at most 4096, or set drafter: none",
    ),
    "heads that do not divide": (
        "engine: {tp: 3}\n", CPU, {},
        "f.yaml:3:14: engine.tp: tp is 3, but the model's 8 heads do not divide by it",
    ),
    "KV heads that do not divide": (
        "engine: {tp: 4}\n", CPU, {"num_kv_heads": 6},
        "f.yaml:3:14: engine.tp: tp is 4, but the model's 6 KV heads neither divide by it nor"
        " divide it",
    ),
    "a context beyond the model": (
        "engine: {context_length: 9000}\n", CPU, {},
        "f.yaml:3:26: engine.context_length: 9000 is beyond the model's 8192 positions: lower it,"
        " or change the model's config with engine.args.json_model_override_args",
    ),
    "logits beyond memory": (
        "budget: {kind: fixed, draft_budget: 1000}\n", CPU, {"vocab_size": 128_000},
        "f.yaml:3:9: budget: the logits of a verify step of 16016 tokens take 7.6 GiB of 16.0 GiB"
        " of memory: lower the budget or engine.max_running_requests",
    ),
    "weights beyond memory": (
        "", CPU, {"num_parameters": 8 * 2**30},
        "f.yaml:2:9: target.model: weights, KV cache and logits take 32.0 GiB, but there are"
        " 16.0 GiB of memory: choose a smaller model, or lower engine.max_total_tokens",
    ),
}  # fmt: skip


WITHOUT_GRAPHS = "verify steps run without CUDA graphs: SGLang captures them without the tree mask"


def make(text: str, host: HostFacts = CPU, **facts: Any) -> Plan:
    pipeline = loads(HEAD + text, "f.yaml")
    return compile(pipeline, model_facts=replace(FACTS, **facts), host_facts=host)


@pytest.mark.parametrize("case", CASES)
def test_a_contradiction_names_both_sides(case: str) -> None:
    text, host, facts, expected = CASES[case]
    with pytest.raises(PlanError) as caught:
        make(text, host, **facts)
    assert str(caught.value) == expected


def test_every_rule_is_broken_by_a_case() -> None:
    broken = set()
    for text, host, facts, _ in CASES.values():
        with pytest.raises(PlanError) as caught:
            make(text, host, **facts)
        broken |= {problem.rule for problem in caught.value.problems}
    by_third_parties = {"every_part_gets_what_it_needs"}
    of_heads = {rule.__name__ for rule in HEAD_RULES}  # test_plan_heads
    assert {rule.__name__ for rule in PLAN_RULES} - by_third_parties - of_heads == broken


def test_a_part_that_misses_something_is_named_with_what_there_is() -> None:
    class Greedy(BestFirst):
        """Wants what no drafter gives."""

        kind = "features_first"
        needs = frozenset({"tea_leaves"})

    pipeline: Pipeline = loads(HEAD, "f.yaml").model_copy(update={"tree": Greedy()})
    with pytest.raises(PlanError) as caught:
        compile(pipeline, model_facts=FACTS, host_facts=CPU)
    assert str(caught.value) == (
        "f.yaml:1:1: tree.kind: tree features_first needs 'tea_leaves', but the parts before it"
        " provide drafts, logits, path_scores, target_features, tokens"
    )


def test_all_contradictions_come_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        make("engine: {tp: 3, context_length: 9000, attention_backend: fa3}\n")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("text", "host", "facts"),
    [
        ("", CPU, {}),
        ("", GPU, {}),
        ("drafter: none\n", GPU, {"is_recurrent": True}),
        ("drafter: none\n", GPU, {"is_mla": True}),
        ("drafter: none\n", GPU, {"sliding_window": 128}),
        ("engine: {context_length: 4096}\n", CPU, {"sliding_window": 4096}),
        ("engine: {tp: 2}\n", GPU, {"num_kv_heads": 1}),
        ("engine: {tp: 8}\n", CPU, {"num_kv_heads": 4}),
        ("engine: {context_length: 8192}\n", CPU, {}),
        ("engine: {args: {cuda_graph_backend_decode: disabled}}\n", CPU, {}),
        ("engine: {args: {cuda_graph_max_bs_decode: 8}}\n", GPU, {}),
        ("engine: {args: {cuda_graph_config: {decode: {max_bs: 8}}}}\n", GPU, {}),
        ("drafter: none\nengine: {args: {cuda_graph_backend_decode: full}}\n", GPU, {}),
    ],
)
def test_what_is_allowed(text: str, host: HostFacts, facts: dict[str, Any]) -> None:
    assert set(make(text, host, **facts).warnings) <= {WITHOUT_GRAPHS}


def test_an_unknown_machine_refuses_nothing() -> None:
    make("engine: {device: cuda, tp: 8}\n", HostFacts.unknown(), num_kv_heads=8)


@pytest.mark.parametrize(
    ("text", "host", "warning"),
    [
        ("engine: {device: cpu}\n", CPU, None),
        ("engine: {attention_backend: fa3}\n", GPU, "fa3 fixes one verify width"),
        ("engine: {max_total_tokens: 8191}\n", CPU, "KV cache of 8191 tokens is shorter"),
        ("engine: {max_running_requests: 4}\n", CPU, "the last 2 rows of the budget are for more"),
        ("", GPU, "verify steps run without CUDA graphs"),
        (
            "engine: {args: {cuda_graph_backend_decode: full}}\n",
            GPU,
            "captured verify steps have not been run on a GPU",
        ),
        ("", replace(GPU, accelerator="amd"), "AMD accelerators have not been tested"),
    ],
)
def test_warnings(text: str, host: HostFacts, warning: str | None) -> None:
    warnings = make(text, host).warnings
    if warning is None:
        assert warnings == ()
    else:
        assert [one for one in warnings if warning in one]
        assert len(warnings) <= 2


def test_half_precision_on_a_cpu_is_allowed_with_a_warning() -> None:
    pipeline = loads("version: 1\ntarget: {model: org/m, dtype: bfloat16}\n")
    (warning,) = compile(pipeline, model_facts=FACTS, host_facts=CPU).warnings
    assert warning.startswith("target.dtype bfloat16 on cpu: near-ties may fall differently")


def test_unknown_facts_are_said() -> None:
    (warning,) = compile(loads(HEAD), model_facts=None, host_facts=CPU).warnings
    assert warning == "the config of org/m is not on this machine: nothing was checked against it"


def test_a_folder_that_is_read_as_an_id_is_said(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "org/m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (warning,) = compile(loads(HEAD), model_facts=FACTS, host_facts=CPU).warnings
    assert warning == "org/m is read as a Hugging Face id; for the folder write ./org/m"


def test_the_catalogue_has_no_unmet_need() -> None:
    """Every combination of built-in parts gets what it needs."""
    drafters = ["ngram", "none", "{kind: merge, of: [ngram, ngram]}"]
    drafters += [f"{{kind: {kind}, checkpoint: org/head}}" for kind in ("block", "autoregressive")]
    for drafter in drafters:
        for tree in parts.catalogue()["tree"]:
            tree = {"static": "{kind: static, paths: [[0]]}"}.get(tree, tree)
            for verify in ("greedy", "sample_and_walk", "{kind: typical, lossy: true}"):
                text = f"drafter: {drafter}\nverify: {verify}\n"
                make(text + (f"tree: {tree}\n" if drafter != "none" else ""))
