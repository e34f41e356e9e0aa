"""Verify trees of two widths with a model folder on SGLang's model runner, captured and eagerly.

Prints JSON per width: whether a graph ran, the batches it was captured for, how far its logits and
hidden states are from the eager ones, and those from what a causal window gives. On a CPU
recorded forwards stand in for graphs (`graph_standin`).
A process of its own, because an engine's globals stay.
"""

from __future__ import annotations

import copy
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

PROMPTS = [[5, 9, 23, 41, 2, 7, 7, 30, 11], [3, 1, 4, 15, 9, 26, 5, 35, 8], [8] * 9]
WIDTHS = (4, 17)
PIPELINE = """version: 1
target: {{model: {folder}, dtype: {dtype}}}
drafter: ngram
budget:
  kind: table
  rows:
    - {{max_batch: 4, draft_budget: 16}}
    - {{max_batch: 8, draft_budget: 3}}
engine:
  device: {device}
  attention_backend: {attention}
  max_running_requests: 8
  max_total_tokens: 1024
  args: {{disable_radix_cache: true, log_level: error{graphs}}}
"""
GRAPHS = (
    ", cuda_graph_backend_decode: full, cuda_graph_bs_decode: [1, 2, 4, 8]"
    ", cuda_graph_backend_prefill: disabled"
)


def planned(folder: str, device: str, attention: str, dtype: str) -> Any:
    """The plan of the probe, with the algorithm and the platform that it needs."""
    from specstack.facts import HostFacts, model_facts
    from specstack.graph_shapes import graph_shapes
    from specstack.plan import ALGORITHM, compile
    from specstack_dsl import loads
    from specstack_serving import sglang_compat as sgl
    from specstack_serving.carrier import export_plan

    graphs = GRAPHS if device == "cuda" else ""
    pipeline = loads(PIPELINE.format(**locals()))
    plan = compile(pipeline, model_facts=model_facts(pipeline), host_facts=HostFacts.detect())
    if device == "cpu":  # where no pipeline may ask for graphs
        shapes = graph_shapes(plan.shapes.verify_widths, pipeline.budget.steps)
        plan = plan.model_copy(update={"graphs": shapes})
    export_plan(plan)
    if device == "cpu":
        from sglang.srt import platforms

        from specstack_serving.cpu.platform import SpecstackCpuPlatform, install

        platforms._current_platform = SpecstackCpuPlatform()  # before anything looks
        install()
        sgl.HookRegistry.apply_hooks()
    from specstack_serving.algorithm import SpecstackAlgo

    register = sgl.SpeculativeAlgorithm.register
    register(ALGORITHM, supports_overlap=True, spec_class=SpecstackAlgo)(lambda _: None)
    return plan


def loaded(plan: Any) -> tuple[Any, Any, Any]:
    """The engine's model runner, its single-batch driver, and the graphs if there are any."""
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs

    from specstack_serving import sglang_compat as sgl
    from specstack_serving.cuda_graphs import GraphRunners
    from specstack_serving.server_args import server_argv

    sys.path.insert(0, str(Path(__file__).parent))
    from graph_standin import stand_in

    args = sgl.prepare_server_args(server_argv(plan))
    args.resolve_once()
    rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    made: list[GraphRunners] = []
    capture = sgl.ModelRunner.init_cuda_graphs

    def init_cuda_graphs(runner: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            if runner.device == "cpu":
                capture(runner, **kwargs)
                captures = stand_in(runner)
            else:
                captures = nullcontext(lambda: capture(runner, **kwargs))
            with captures as capture_widest:
                runner.model.set_dflash_layers_to_capture([0])
                graphs = GraphRunners(plan.graphs, runner, sgl.CaptureHiddenMode.FULL)
                graphs.install()
                capture_widest()
                graphs.build()
        made.append(graphs)

    sgl.ModelRunner.init_cuda_graphs = init_cuda_graphs
    bench, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(len(PROMPTS), 9, PROMPTS)
    _, _, batch = bench.extend(requests)
    return bench.torch_runner, batch, made[0]


def random_trees(batch: Any, width: int, vocab: int) -> Any:
    """Irregular trees, one per request; full, so that every row is compared."""
    from specstack.types import DraftTree
    from specstack_kernels.ops import link_tree

    generator = torch.Generator().manual_seed(width)
    parents = torch.tensor(
        [
            [-1] + [int(torch.randint(n, (1,), generator=generator)) for n in range(1, width)]
            for _ in PROMPTS
        ]
    )
    full = torch.full((len(PROMPTS),), width)
    linked = link_tree(parents, full, max_depth=width)._asdict()
    tokens = torch.randint(2, vocab, parents.shape, generator=generator)
    device = batch.seq_lens.device
    return DraftTree(
        tokens=tokens.to(device),
        parent_index=parents.to(device),
        log_q=torch.zeros(parents.shape, device=device),
        num_nodes=full.to(device),
        **{name: value.to(device) for name, value in linked.items()},
    )


@torch.no_grad()
def outputs(runner: Any, batch: Any, tree: Any, inside: AbstractContextManager[None]) -> Any:
    """Logits and hidden states [B * N, V + D] and whether a graph gave them."""
    from specstack_serving import sglang_compat as sgl
    from specstack_serving.verify_input import pack_nodes, verify_batch, window_slots

    batch, on_cpu = copy.copy(batch), runner.device == "cpu"
    window = window_slots(batch, tree.num_draft_tokens)
    with inside:
        forward = verify_batch(
            batch, runner, tree, window, pack_nodes(tree, ragged=on_cpu),
            window_mask=on_cpu, capture_hidden_mode=sgl.CaptureHiddenMode.FULL,
        )  # fmt: skip
        out = runner.forward(forward)
    found = [out.logits_output.next_token_logits, out.logits_output.hidden_states]
    return torch.cat([part.float().cpu() for part in found], dim=1), bool(out.can_run_graph)


def reserve(runner: Any, batch: Any) -> None:
    """KV slots for the widest window."""
    width = max(WIDTHS)
    slots = runner.token_to_kv_pool_allocator.alloc(len(PROMPTS) * width).view(-1, width)
    rows = batch.req_pool_indices.to(torch.int64)[:, None]
    columns = batch.seq_lens[:, None] + torch.arange(width, device=slots.device)
    table = runner.req_to_token_pool.req_to_token
    table[rows, columns] = slots.to(table.dtype)


def main(folder: str, device: str, attention: str, dtype: str) -> None:
    runner, batch, graphs = loaded(planned(folder, device, attention, dtype))
    reserve(runner, batch)
    found = {}
    for width in WIDTHS:
        tree = random_trees(batch, width, 64)
        chain = replace(tree, tree_mask=torch.ones_like(tree.tree_mask).tril())
        captured = [outputs(runner, batch, one, graphs.activate(width)) for one in (tree, chain)]
        engines, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
        eager = [outputs(runner, batch, one, nullcontext()) for one in (tree, chain)]
        runner.decode_cuda_graph_runner = engines
        assert not any(ran for _, ran in eager)
        assert len(eager[0][0]) == len(PROMPTS) * width
        pairs = zip(captured, eager, strict=True)
        found[width] = {
            "ran": all(ran for _, ran in captured),
            "captured": graphs._captured[width][1].capture_bs,
            "error": max((one - other).abs().max().item() for (one, _), (other, _) in pairs),
            "without_mask": (eager[0][0] - eager[1][0]).abs().max().item(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
