"""From names to objects, and the torch-free estimate of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specstack import memory
from specstack.bind import bind, implementation
from specstack.facts import HostFacts, ModelFacts
from specstack.plan import Plan, compile
from specstack_dsl import loads

CPU = HostFacts(accelerator="none", num_accelerators=0, memory_bytes=16 * 2**30, num_cpus=4)
FACTS = ModelFacts(
    architecture="LlamaForCausalLM", num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=2,
    head_dim=8, vocab_size=1000, max_position_embeddings=8192, num_parameters=1_000_000,
)  # fmt: skip
HEAD = "version: 1\ntarget: org/m\n"


def plan(text: str = "", facts: ModelFacts | None = FACTS, host: HostFacts = CPU) -> Plan:
    return compile(loads(HEAD + text), model_facts=facts, host_facts=host)


@pytest.mark.parametrize("tree", ["chain", "best_first"])
@pytest.mark.parametrize("verify", ["greedy", "sample_and_walk"])
@pytest.mark.parametrize("budget", ["{kind: fixed, draft_budget: 4}", None])
def test_every_combination_of_parts_becomes_live(
    tree: str, verify: str, budget: str | None
) -> None:
    text = f"tree: {tree}\nverify: {verify}\n" + (f"budget: {budget}\n" if budget else "")
    made = plan(text)
    bound = bind(made)
    for live, part in (
        (bound.drafter, made.drafter),
        (bound.tree_builder, made.tree),
        (bound.verify_rule, made.verify),
        (bound.budget_policy, made.budget),
    ):
        assert isinstance(live, implementation(part.implementation))


def test_no_drafter_is_none() -> None:
    assert bind(plan("drafter: none\n")).drafter is None


def test_a_plan_from_json_binds_like_the_plan() -> None:
    made = plan()
    again = Plan.model_validate_json(made.model_dump_json())
    assert type(bind(again).drafter) is type(bind(made).drafter)


class TestMemory:
    def test_weights(self) -> None:
        assert memory.weights_bytes(plan()) == 4_000_000
        assert memory.weights_bytes(plan(facts=None)) is None
        assert memory.weights_bytes(plan(facts=replace(FACTS, quantization="awq"))) is None

    def test_kv_cache(self) -> None:
        made = plan("engine: {max_total_tokens: 2048}\n")
        assert memory.kv_bytes_per_token(made) == 2 * 2 * 2 * 8 * 4
        assert memory.kv_pool_bytes(made) == 2048 * 256

    def test_a_kv_cache_type_of_its_own(self) -> None:
        made = plan("engine: {args: {kv_cache_dtype: fp8_e4m3}}\n")
        assert memory.kv_bytes_per_token(made) == 2 * 2 * 2 * 8
        unknown = plan("engine: {args: {kv_cache_dtype: fp4_e2m1}}\n")
        assert memory.kv_bytes_per_token(unknown) is None

    @pytest.mark.parametrize(
        ("steps", "tokens"),
        [
            (((None, 3),), 64),  # 16 requests of 4 nodes
            (((4, 15),), 64),  # 4 of 16
            (((4, 1), (64, 7)), 128),  # 16 of 8
            (((1, 1),), 16),  # plain decoding of 16 requests is more than 2 nodes
        ],
    )
    def test_the_largest_verify_step(
        self, steps: tuple[tuple[int | None, int], ...], tokens: int
    ) -> None:
        assert memory.peak_verify_tokens(plan(), steps) == tokens
        assert memory.tree_logits_bytes(plan(), steps) == tokens * 1000 * 4

    def test_it_is_unknown_when_the_batch_has_no_bound(self) -> None:
        made = plan(host=HostFacts.unknown())
        assert memory.peak_verify_tokens(made, ((None, 3),)) is None
        assert memory.tree_logits_bytes(made, ((None, 3),)) is None
