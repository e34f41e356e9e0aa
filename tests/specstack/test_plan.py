"""Compilation: values, shapes, origins, hash, and SGLang arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from specstack.facts import HostFacts, ModelFacts
from specstack.graph_shapes import GraphShape
from specstack.plan import Plan, compile, sglang_args, verify_widths
from specstack_dsl import loads

CPU = HostFacts(accelerator="none", num_accelerators=0, memory_bytes=16 * 2**30, num_cpus=4)
GPU = replace(CPU, accelerator="nvidia", num_accelerators=2)
FACTS = ModelFacts(
    architecture="LlamaForCausalLM", num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3,
    head_dim=64, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True,
    dtype="bfloat16", num_parameters=134_479_872,
)  # fmt: skip
HEAD = "version: 1\ntarget: org/m\n"


def plan(
    text: str = "", host: HostFacts = CPU, facts: ModelFacts | None = FACTS, **kwargs: Any
) -> Plan:
    return compile(loads(HEAD + text, **kwargs), model_facts=facts, host_facts=host)


class TestParts:
    def test_options_are_the_keyword_arguments_of_the_implementation(self) -> None:
        made = plan("tree: {kind: best_first, depth: 6}\n")
        assert made.drafter.implementation == "specstack.drafters.ngram:NgramDrafter"
        assert made.drafter.options == {
            "max_depth": 6, "min_match": 2, "max_match": 16, "max_occurrences": 16,
            "shared_tokens": 0,
        }  # fmt: skip
        assert made.tree.options == {"depth": 6, "width": None, "calibration": None, "cost": None}
        assert made.verify.options == {}
        assert made.budget.options["rows"][0] == {
            "max_batch": 4,
            "draft_budget": 16,
            "min_survival": 0.0,
        }

    def test_a_chain_with_a_fixed_budget(self) -> None:
        text = "tree: {kind: chain, depth: 4}\nbudget: {kind: fixed, draft_budget: 3}\n"
        made = plan(text + "verify: greedy\n")
        assert made.tree.options == {"depth": 4, "calibration": None, "cost": None}
        assert made.budget.options == {"draft_budget": 3, "min_survival": 0.0}
        assert made.verify.implementation == "specstack.verify.greedy:GreedyRule"

    def test_no_drafter(self) -> None:
        made = plan("drafter: none\n")
        assert made.drafter.model_dump() == {"kind": "none", "implementation": "", "options": {}}
        assert made.shapes.model_dump() == {
            "max_draft_budget": 0, "max_depth": 0, "verify_widths": (1,), "draft_budgets": (0,),
        }  # fmt: skip
        assert not made.speculates


class TestShapes:
    @pytest.mark.parametrize(
        ("budgets", "widths"),
        [
            ([], (1,)),
            ([0], (1,)),
            ([1], (1, 2)),
            ([3], (1, 2, 4)),
            ([4, 16], (1, 2, 4, 5, 8, 16, 17)),
            ([15, 7], (1, 2, 4, 8, 16)),
        ],
    )
    def test_widths_are_budgets_plus_one_and_powers_of_two(
        self, budgets: list[int], widths: tuple[int, ...]
    ) -> None:
        assert verify_widths(budgets) == widths

    def test_a_tree_is_no_deeper_than_its_budget(self) -> None:
        shapes = plan("budget: {kind: fixed, draft_budget: 3}\n").shapes
        assert (shapes.max_draft_budget, shapes.max_depth) == (3, 3)

    def test_rows_that_the_engine_cannot_reach_do_not_count(self) -> None:
        text = "budget:\n  kind: table\n  rows:\n" + "".join(
            f"    - {{max_batch: {batch}, draft_budget: {budget}}}\n"
            for batch, budget in ((8, 3), (16, 4), (32, 9))
        )
        assert plan(text).shapes.max_draft_budget == 4  # 16 requests on a CPU
        assert plan(text, GPU).shapes.max_draft_budget == 9

    def test_budget_zero_is_plain_decoding(self) -> None:
        shapes = plan("budget: {kind: fixed, draft_budget: 0}\n").shapes
        assert (shapes.max_draft_budget, shapes.max_depth, shapes.verify_widths) == (0, 0, (1,))


class TestAuto:
    def test_on_a_cpu(self) -> None:
        made = plan()
        assert made.target.dtype == "float32"
        engine = made.engine
        assert (engine.device, engine.attention_backend) == ("cpu", "specstack_cpu")
        assert (engine.page_size, engine.max_running_requests) == (1, 16)
        assert engine.max_total_tokens == 32768
        assert engine.context_length is None

    def test_on_an_accelerator(self) -> None:
        made = plan(host=GPU)
        assert made.target.dtype == "bfloat16"
        engine = made.engine
        assert (engine.device, engine.attention_backend, engine.page_size) == ("cuda", "triton", 1)
        assert (engine.max_running_requests, engine.max_total_tokens) == (None, None)

    def test_without_facts_the_dtype_is_left_to_sglang(self) -> None:
        assert plan(host=GPU, facts=None).target.dtype == "auto"
        assert plan(facts=None).target.dtype == "float32"

    def test_what_is_stated_is_taken(self) -> None:
        engine = plan(
            "engine: {page_size: 16, max_running_requests: 2, max_total_tokens: 999,"
            " context_length: 77}\n"
        ).engine
        assert (engine.page_size, engine.max_running_requests) == (16, 2)
        assert (engine.max_total_tokens, engine.context_length) == (999, 77)

    def test_little_memory_makes_a_small_kv_cache(self) -> None:
        made = plan(host=replace(CPU, memory_bytes=2**31))
        per_token = 2 * 30 * 3 * 64 * 4
        assert made.engine.max_total_tokens == 2**29 // per_token // 1024 * 1024
        assert "25% of 2 GiB" in made.origins["engine.max_total_tokens"]

    def test_few_short_requests_need_a_small_kv_cache(self) -> None:
        made = plan("engine: {max_running_requests: 2, context_length: 2048}\n")
        assert made.engine.max_total_tokens == 4096


class TestOrigins:
    def test_every_value_has_one(self) -> None:
        from specstack.explain import flat_values

        for text in (
            "",
            "drafter: none\n",
            "tree: chain\nbudget: {kind: fixed, draft_budget: 1}\n",
        ):
            made = plan(text)
            assert set(flat_values(made)) == set(made.origins)

    def test_they_say_where_a_value_came_from(self) -> None:
        made = plan("tree: {kind: chain, depth: 4}\n", file="f.yaml", overrides=["engine.port=1"])
        assert made.origins["tree.depth"] == "f.yaml:3"
        assert made.origins["tree.kind"] == "f.yaml:3"
        assert made.origins["engine.port"] == "--set engine.port=1"
        assert made.origins["verify.kind"] == "default"
        assert made.origins["drafter.max_depth"] == "derived: the depth of the tree"
        assert made.origins["engine.device"] == "derived: no accelerator is visible"

    def test_a_stated_auto_is_derived(self) -> None:
        made = plan("engine: {device: auto}\n")
        assert made.origins["engine.device"].startswith("derived: ")


class TestData:
    def test_a_plan_survives_json(self) -> None:
        made = plan("engine: {args: {dp_size: 2, warmups: [a], log_level: null}}\n")
        assert Plan.model_validate_json(made.model_dump_json()) == made
        assert Plan.model_validate(json.loads(made.model_dump_json())).hash == made.hash

    def test_the_hash_is_of_decisions_only(self) -> None:
        same = {plan().hash, plan(file="other.yaml").hash, plan("tree: best_first\n").hash}
        assert len(same) == 1
        assert len(plan().hash) == 64

    @pytest.mark.parametrize(
        "text",
        ["tree: {kind: best_first, depth: 7}\n", "verify: greedy\n", "engine: {page_size: 2}\n"],
    )
    def test_the_hash_changes_with_a_decision(self, text: str) -> None:
        assert plan(text).hash != plan().hash

    def test_the_hash_does_not_depend_on_where_the_cache_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = "version: 1\ntarget: packaged:smollm2-135m-instruct\n"
        hashes = set()
        for folder in ("/a", "/b"):
            monkeypatch.setenv("SPECSTACK_CACHE", folder)
            hashes.add(compile(loads(text), model_facts=FACTS, host_facts=CPU).hash)
        assert len(hashes) == 1


class TestSGLang:
    def test_arguments_on_a_cpu(self) -> None:
        assert sglang_args(plan()) == {
            "model_path": "org/m",
            "served_model_name": "org/m",
            "dtype": "float32",
            "device": "cpu",
            "tp_size": 1,
            "attention_backend": "specstack_cpu",
            "page_size": 1,
            "max_running_requests": 16,
            "max_total_tokens": 32768,
            "host": "127.0.0.1",
            "port": 30000,
            "enable_metrics": True,
            "speculative_algorithm": "SPECSTACK",
            "cuda_graph_backend_decode": "disabled",
            "cuda_graph_backend_prefill": "disabled",
        }

    def test_plain_decoding_names_no_algorithm(self) -> None:
        assert "speculative_algorithm" not in sglang_args(plan("drafter: none\n"))

    def test_an_accelerator_keeps_the_graphs_of_its_prefill_alone(self) -> None:
        args = sglang_args(plan(host=GPU))
        graphs = {name: value for name, value in args.items() if name.startswith("cuda_graph")}
        assert graphs == {"cuda_graph_backend_decode": "disabled"}

    def test_graphs_are_captured_where_they_are_asked_for(self) -> None:
        asked = "engine: {args: {cuda_graph_backend_decode: full}}\n"
        made = plan(asked, GPU)
        assert sglang_args(made)["cuda_graph_backend_decode"] == "full"
        assert made.graphs
        assert Plan.model_validate_json(made.model_dump_json()) == made
        assert not plan("", GPU).graphs
        assert not plan("drafter: none\n" + asked, GPU).graphs

    def test_a_plan_without_graphs_has_the_hash_that_it_had(self) -> None:
        without = plan("", GPU)
        shape = GraphShape(width=2, max_batch=None)
        assert without.model_copy(update={"graphs": ()}).hash == without.hash
        assert without.model_copy(update={"graphs": (shape,)}).hash != without.hash

    def test_first_tokens_on_an_accelerator_follow_the_law_of_the_rules(self) -> None:
        assert sglang_args(plan(host=GPU))["sampling_backend"] == "pytorch"
        own = sglang_args(plan("engine: {args: {sampling_backend: flashinfer}}\n", host=GPU))
        assert own["sampling_backend"] == "flashinfer"
        for other in (plan("drafter: none\n", host=GPU), plan()):
            assert "sampling_backend" not in sglang_args(other)

    def test_further_arguments_are_added_by_name(self) -> None:
        args = sglang_args(plan("engine: {args: {trust_remote_code: true}}\n"))
        assert args["trust_remote_code"] is True

    def test_sglang_knows_every_argument(self) -> None:
        from specstack_dsl.sglang_args import frozen

        text = "engine: {max_total_tokens: 1, context_length: 1}\n"
        for host in (CPU, GPU):
            assert set(sglang_args(plan(text, host=host))) <= frozen()[1]
