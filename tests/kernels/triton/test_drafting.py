"""Head drafters on Triton kernels: what a GPU runs, from features to a tree, gives the same tree.

Every op that has a kernel is replaced where drafters and builders call it, so that strides, dtypes
and shapes are those of a round. Close scores may change places: log q are compared, not tokens.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import specstack_kernels.ops as ops
from specstack_kernels.choices import GPU_KERNELS

sys.path.insert(0, str(Path(__file__).parents[2] / "specstack"))
from head_bench import CASES, DEPTH, Bench, three_requests

from specstack.drafters.context_writer import ContextWriter
from specstack.drafters.search import make_search
from specstack.trees.best_first import BestFirstBuilder

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="drafters' tensors are on the CPU here"
)
CALLERS = (
    "specstack.drafters.choice",
    "specstack.drafters.conditioned",
    "specstack.drafters.context_writer",
    "specstack.drafters.refresh",
    "specstack.models.heads.layers",
    "specstack.trees.assemble",
    "specstack.trees.ranked",
)
BLOCKS = [case for case in CASES if "autoregressive" not in case]


@pytest.fixture
def on_triton(monkeypatch):
    """Counts the calls of each kernel."""
    calls = dict.fromkeys(GPU_KERNELS, 0)

    def counted(name):
        kernel = getattr(import_module(f"specstack_kernels.triton.{name}"), name)

        def call(*args, **kwargs):
            calls[name] += 1
            return kernel(*args, **kwargs)

        return call

    for caller in map(import_module, CALLERS):
        for name in GPU_KERNELS:
            if getattr(caller, name, None) is getattr(ops, name):
                monkeypatch.setattr(caller, name, counted(name))
    return calls


def trees(bench, requests, slots, *, paged):
    """From the features to trees of seven drafts."""
    lengths = [r.length for r in requests]
    pool = bench.drafter._pool if hasattr(bench.drafter, "_pool") else None
    if pool is not None and paged:
        pool.is_paged = True
        bench.drafter._writer = ContextWriter(bench.drafter._head, pool)
    bench.absorb(requests, slots, [0, 0, 0], lengths, padding=2)
    batch = bench.batch(requests, slots, lengths)
    proposal = bench.drafter.propose(batch, 7)
    return BestFirstBuilder(DEPTH).build(proposal, batch.bonus_tokens, 7)


@pytest.mark.parametrize("case", [*BLOCKS, "autoregressive"])
def test_a_tree_of_kernels_is_the_tree_of_torch(case, tmp_path, on_triton, monkeypatch):
    bench = Bench(case, tmp_path, dtype=torch.float32)
    requests, slots = three_requests(bench), [6, 0, 3]
    found = trees(bench, requests, slots, paged=True)
    used = {name for name, count in on_triton.items() if count}
    assert {"best_nodes", "link_tree"} <= used
    if case != "autoregressive":
        assert {"draft_attention"} <= used
        assert used & {"context_kv", "mix_kv", "sum_kv"} or case == "block kv"
        assert ("score_frontier" in used) == (bench.head.corrector is not None)
        assert ("best_prefixes" in used) == (bench.head.corrector is None)
    monkeypatch.undo()
    bench.poison()
    if hasattr(bench.drafter, "_pool"):
        bench.drafter._pool.is_paged, bench.drafter._writer = False, None
    expected = trees(bench, requests, slots, paged=False)
    torch.testing.assert_close(found.log_q, expected.log_q, atol=2e-4, rtol=1e-4)
    assert torch.equal(found.num_nodes, expected.num_nodes)


@pytest.mark.parametrize(
    "search", [{"width": 1}, {"width": 2, "frontier": 2}, {"paths": [[0], [1], [0, 0]]}]
)
def test_other_searches_run_on_kernels(search, tmp_path, on_triton):
    bench = Bench("block markov hidden", tmp_path, dtype=torch.float32)
    bench.drafter.search = make_search(**search)
    tree = trees(bench, three_requests(bench), [6, 0, 3], paged=True)
    assert (tree.num_nodes > 1).all()
    assert on_triton["score_frontier"] > 0
