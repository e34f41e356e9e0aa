"""The verify batch in SGLang's terms, against loops that are obviously right."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specstack.types import DraftTree
from specstack_kernels.ops import link_tree, path_slots
from specstack_kernels.testing import random_tree
from specstack_serving import sglang_compat as sgl
from specstack_serving.verify_input import (
    DraftState,
    TreeVerifyInput,
    _full_mask,
    pack_nodes,
    verify_batch,
    window_slots,
)

pytest.importorskip("sglang")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
SHAPES = [(1, 1), (1, 2), (3, 7), (4, 17)]


def trees(batch: int, nodes: int, seed: int = 0) -> DraftTree:
    made = random_tree(batch, nodes, 32, seed)
    linked = link_tree(made.parent_index, made.num_nodes, max_depth=made.max_depth)
    return DraftTree(
        tokens=made.draft_tokens,
        parent_index=made.parent_index,
        **linked._asdict(),
        log_q=torch.zeros(batch, nodes),
        num_nodes=made.num_nodes,
    )


def random_paths(tree: DraftTree) -> Tensor:
    """A path of each tree, root first, padded with -1 to the deepest one and one more."""
    width = int(tree.depth.max()) + 2
    rows = []
    for b in range(len(tree.tokens)):
        node = int(torch.randint(int(tree.num_nodes[b]), (1,)))
        path = [node]
        while path[0] > 0:
            path.insert(0, int(tree.parent_index[b, path[0]]))
        rows.append(path + [-1] * (width - len(path)))
    return torch.tensor(rows)[:, : tree.num_draft_tokens]


def compacted(cache: Tensor, window: Tensor, accept_index: Tensor) -> Tensor:
    """Node by node from the front: what the cache must hold at the path's positions."""
    result = cache.clone()
    for b, path in enumerate(accept_index.tolist()):
        for position, node in enumerate(path):
            if node >= 0:
                result[window[b, position]] = cache[window[b, node]]
    return result


@pytest.mark.parametrize(("batch", "nodes"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_the_accepted_path_comes_to_the_front_of_the_window(
    batch: int, nodes: int, seed: int
) -> None:
    torch.manual_seed(seed)
    tree = trees(batch, nodes, seed)
    cache = torch.randn(batch * nodes + 5, 2)
    window = torch.randperm(len(cache))[: batch * nodes].view(batch, nodes)
    accept_index = random_paths(tree)
    target, source = path_slots(window, accept_index)
    moved = cache.clone()
    moved[target] = cache[source]
    assert torch.equal(moved, compacted(cache, window, accept_index))


@pytest.mark.parametrize("order", ["at once", "one by one"])
def test_overlapping_moves_are_safe_in_either_order(order: str) -> None:
    """Paths rise, so a slot is read before, or when, the one that overwrites it comes."""
    cache = torch.arange(6)
    window = torch.arange(6)[None]
    target, source = path_slots(window, torch.tensor([[0, 2, 3, 5, -1]]))
    if order == "at once":
        cache[target] = cache[source]
    else:
        for to, from_ in zip(target.tolist(), source.tolist(), strict=True):
            cache[to] = cache[from_]
    assert cache.tolist()[:4] == [0, 2, 3, 5]


def test_no_slot_outside_the_path_is_written() -> None:
    window = torch.tensor([[4, 9, 7, 2]])
    target, source = path_slots(window, torch.tensor([[0, 3, -1, -1]]))
    changed = target[target != source]
    assert changed.tolist() == [9]
    assert len(set(target.tolist())) == len(target), "no slot is written twice"


def slow_full_mask(seq_lens: list[int], tree: DraftTree) -> list[bool]:
    """Rows of `seq_len + N`: the whole prefix, then the node and its ancestors."""
    flat: list[bool] = []
    nodes = tree.num_draft_tokens
    for b, length in enumerate(seq_lens):
        for node in range(nodes):
            ancestors = {node}
            above = node
            while above > 0:
                above = int(tree.parent_index[b, above])
                ancestors.add(above)
            flat += [True] * length + [column in ancestors for column in range(nodes)]
    return flat


@pytest.mark.parametrize(("batch", "nodes"), SHAPES)
def test_the_full_mask_has_the_engines_layout(batch: int, nodes: int) -> None:
    tree = trees(batch, nodes)
    seq_lens = [0, 3, 1, 11][:batch]
    mask = _full_mask(
        SimpleNamespace(seq_lens=torch.tensor(seq_lens), seq_lens_cpu=torch.tensor(seq_lens)),
        tree.tree_mask,
    )
    live = torch.arange(nodes) < tree.num_nodes[:, None]
    rows = torch.cat([
        live[b, :, None].expand(nodes, length + nodes).reshape(-1)
        for b, length in enumerate(seq_lens)
    ])  # fmt: skip
    want = torch.tensor(slow_full_mask(seq_lens, tree))
    assert mask.dtype == torch.bool
    assert len(mask) == sum(seq_lens) * nodes + nodes * nodes * batch
    assert torch.equal(mask[rows], want[rows])


def batch_of(seq_lens: list[int], rows: list[int]) -> Any:
    table = torch.arange(5 * 40, dtype=torch.int32).view(5, 40)
    lens = torch.tensor(seq_lens)
    return SimpleNamespace(
        seq_lens=lens,
        seq_lens_cpu=lens,
        req_pool_indices=torch.tensor(rows, dtype=torch.int32),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )


@pytest.mark.parametrize("nodes", [1, 5])
def test_the_window_follows_the_committed_tokens(nodes: int) -> None:
    slots = window_slots(batch_of([3, 0, 11], [4, 0, 2]), nodes)
    assert slots.tolist() == [[start + i for i in range(nodes)] for start in (163, 0, 91)]
    assert slots.dtype == torch.int64


@pytest.mark.parametrize(("batch", "nodes"), SHAPES)
@pytest.mark.parametrize("ragged", [False, True])
def test_packing_keeps_live_nodes_in_order_and_gives_dead_ones_their_roots_row(
    batch: int, nodes: int, ragged: bool
) -> None:
    tree = trees(batch, nodes)
    packed = pack_nodes(tree, ragged=ragged)
    kept = [
        (b, n) for b in range(batch) for n in range(nodes)
        if not ragged or n < int(tree.num_nodes[b])
    ]  # fmt: skip
    if packed.computed is None:
        assert len(kept) == batch * nodes
    else:
        assert packed.computed.tolist() == [b * nodes + n for b, n in kept]
    for b in range(batch):
        for n in range(nodes):
            row = (b, n) if (b, n) in kept else (b, 0)
            assert int(packed.rows[b, n]) == kept.index(row)


def test_roots_alone_are_all_computed_without_a_look_at_what_lives() -> None:
    tree = replace(DraftTree.root_only(torch.arange(3)), num_nodes=torch.zeros(3))
    packed = pack_nodes(tree, ragged=True)
    assert packed.computed is None
    assert packed.rows.tolist() == [[0], [1], [2]]


@pytest.mark.parametrize("window_mask", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_the_verify_batch_describes_every_computed_node(
    monkeypatch: pytest.MonkeyPatch, window_mask: bool, ragged: bool
) -> None:
    tree, batch = trees(3, 7), batch_of([3, 5, 0], [1, 2, 0])
    window, packed = window_slots(batch, 7), pack_nodes(tree, ragged=ragged)
    built: list[Any] = []

    def init_new(*args: Any, **options: Any) -> None:
        built.append(args)

    monkeypatch.setattr(sgl, "ForwardBatch", SimpleNamespace(init_new=init_new), raising=False)
    verify_batch(
        batch, "runner", tree, window, packed, window_mask=window_mask, capture_hidden_mode=None
    )
    assert built == [(batch, "runner")]
    info, kept = batch.spec_info, packed.computed
    positions = tree.depth + torch.tensor([[3], [5], [0]])
    for found, nodes in (
        (batch.input_ids, tree.tokens), (batch.out_cache_loc, window), (info.positions, positions),
    ):  # fmt: skip
        flat = nodes.flatten()
        assert torch.equal(found, flat if kept is None else flat[kept])
    assert (kept is not None) is ragged
    assert batch.forward_mode.is_target_verify()
    assert len(info.custom_mask) == (3 * 49 if window_mask else 3 * 49 + 8 * 7)
    assert (info.draft_token_num, info.max_tree_depth, info.tree_topk) == (7, 7, -1)
    assert isinstance(info, TreeVerifyInput)


@pytest.mark.parametrize("relayed", [False, True])
def test_states_filter_and_merge_like_their_requests(relayed: bool) -> None:
    def state(tokens: list[int]) -> DraftState:
        made = DraftState(torch.tensor(tokens), torch.tensor(tokens) * 10)
        made.future_indices = torch.tensor(tokens) + 100 if relayed else None
        return made

    one, two = state([1, 2, 3]), state([4, 5])
    one.filter_batch(torch.tensor([2, 0]), new_indices_cpu=[2, 0])
    one.merge_batch(two)
    if relayed:
        assert one.future_indices is not None
        assert one.future_indices.tolist() == [103, 101, 104, 105]
    else:
        assert one.bonus_tokens.tolist() == [3, 1, 4, 5]
        assert one.new_seq_lens.tolist() == [30, 10, 40, 50]


def test_filtering_out_everything_leaves_an_empty_state() -> None:
    state = DraftState(torch.tensor([1]), torch.tensor([2]))
    state.filter_batch(torch.tensor([], dtype=torch.int64))
    state.merge_batch(DraftState(torch.tensor([7]), torch.tensor([8])))
    assert (state.bonus_tokens.tolist(), state.new_seq_lens.tolist()) == ([7], [8])
