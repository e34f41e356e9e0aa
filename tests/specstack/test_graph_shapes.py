"""Which verify steps are captured: the batches of each width, and what `explain` says of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from specstack.budget.base import Load
from specstack.budget.table import TablePolicy
from specstack.explain import explain
from specstack.facts import HostFacts, ModelFacts
from specstack.graph_shapes import GraphShape, graph_index_bytes, graph_shapes
from specstack.plan import Plan, compile, verify_widths
from specstack_dsl import loads

GPU = HostFacts(accelerator="nvidia", num_accelerators=1, memory_bytes=2**36, num_cpus=4)
FACTS = ModelFacts(
    architecture="LlamaForCausalLM", num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=2,
    head_dim=8, vocab_size=1000, max_position_embeddings=8192, num_parameters=1_000_000,
)  # fmt: skip
TABLE = "budget:\n  kind: table\n  rows:\n" + "".join(
    f"    - {{max_batch: {batch}, draft_budget: {budget}}}\n" for batch, budget in ((3, 16), (8, 3))
)
STEPS = ((3, 16), (8, 3))


def pipeline_of(text: str = "", args: str = ""):
    graphs = f"engine: {{args: {{cuda_graph_backend_decode: full{args}}}}}\n"
    return loads("version: 1\ntarget: org/m\n" + graphs + text)


def plan(text: str = "", args: str = "", facts: ModelFacts | None = FACTS) -> Plan:
    return compile(pipeline_of(text, args), model_facts=facts, host_facts=GPU)


def test_a_width_is_for_the_batches_whose_budget_reaches_it() -> None:
    shapes = graph_shapes(verify_widths([16, 3]), STEPS)
    assert [(shape.width, shape.max_batch) for shape in shapes] == [
        (1, None), (2, 8), (4, 8), (8, 3), (16, 3), (17, 3),
    ]  # fmt: skip


def test_one_budget_is_for_all_batches() -> None:
    shapes = graph_shapes(verify_widths([3]), ((None, 3),))
    assert {shape.max_batch for shape in shapes} == {None}
    assert [shape.width for shape in shapes] == [1, 2, 4]


def test_every_round_of_a_table_has_its_graph_and_no_graph_is_idle() -> None:
    """A round may run at any width up to its budget's; each needs a captured batch size."""
    sizes = [1, 2, 4, 8, 16]
    policy = TablePolicy([{"max_batch": b, "draft_budget": n} for b, n in STEPS])
    widths = verify_widths([16, 3])
    used: dict[int, set[int]] = {width: set() for width in widths}
    for num_requests, width in product(range(1, 17), widths):
        if width <= policy.next(Load(num_running=num_requests)).draft_budget + 1:
            used[width].add(min(size for size in sizes if size >= num_requests))
    captured = {s.width: s.batch_sizes(sizes) for s in graph_shapes(widths, STEPS)}
    assert captured == {width: sorted(batches) for width, batches in used.items()}


@pytest.mark.parametrize(
    ("most", "captured"),
    [(None, [1, 2, 4, 8]), (1, [1]), (3, [1, 2, 4]), (4, [1, 2, 4]), (99, [1, 2, 4, 8])],
)
def test_batch_sizes_end_with_the_first_that_holds_the_largest_batch(
    most: int | None, captured: list[int]
) -> None:
    assert GraphShape(width=2, max_batch=most).batch_sizes([1, 2, 4, 8]) == captured


def test_explain_lists_what_is_captured() -> None:
    pipeline = pipeline_of(TABLE, ", cuda_graph_bs_decode: [1, 2, 4, 8, 16]")
    made = compile(pipeline, model_facts=FACTS, host_facts=GPU)
    data = explain(pipeline, made).as_data()
    assert data["graphs"][17] == "batches of 1, 2, 4"
    assert data["graphs"][4] == "batches of 1, 2, 4, 8"
    assert data["graphs"][1] == "batches of 1, 2, 4, 8, 16"
    assert data["memory_bytes"]["graph_index"] == graph_index_bytes(made)
    pipeline = pipeline_of(TABLE)
    data = explain(pipeline, plan(TABLE)).as_data()
    assert data["graphs"][17] == "SGLang's batch sizes up to 3"
    assert data["graphs"][1] == "SGLang's batch sizes"
    assert data["memory_bytes"]["graph_index"] is None


def test_explain_has_no_graphs_by_default() -> None:
    pipeline = loads("version: 1\ntarget: org/m\n" + TABLE)
    data = explain(pipeline, compile(pipeline, model_facts=FACTS, host_facts=GPU)).as_data()
    assert data["graphs"] == {}
    assert "graph_index" not in data["memory_bytes"]


def test_index_bytes_are_eight_and_a_mask_per_node_and_position() -> None:
    text = "budget: {kind: fixed, draft_budget: 1}\n"
    made = plan(text, ", cuda_graph_bs_decode: [1, 4]")
    nodes_1, nodes_2 = 4 * 1, 4 * 2
    assert graph_index_bytes(made) == (
        8 * 8192 * (nodes_1 + nodes_2) + nodes_1 * (8192 + 1) + nodes_2 * (8192 + 2)
    )
    assert graph_index_bytes(plan(text, ", cuda_graph_bs_decode: [1, 4]", None)) is None
    longer = replace(FACTS, max_position_embeddings=16384)
    assert graph_index_bytes(plan(text, ", cuda_graph_bs_decode: [1, 4]", longer)) > (
        graph_index_bytes(made) or 0
    )
