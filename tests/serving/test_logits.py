"""Penalties per path: each node gets what the engine's own penalizers give token after token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specstack.types import DraftTree, NodeLogits
from specstack_kernels.ops import link_tree
from specstack_kernels.testing import random_tree
from specstack_serving import sglang_compat as sgl
from specstack_serving.logits import adjust_logits, needs_output_history
from specstack_serving.verify_input import pack_nodes

pytest.importorskip("sglang")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
VOCAB = 12
DEFAULTS: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "stop_token_ids": None,
}
ALL = {
    "frequency_penalty": 0.7,
    "presence_penalty": -0.4,
    "repetition_penalty": 1.3,
    "min_new_tokens": 5,
}
SETTINGS = [*({name: value} for name, value in ALL.items()), ALL, {}]


@pytest.fixture(autouse=True)
def _no_compiler() -> Iterator[None]:
    """The engine compiles its scaling penalty; the eager form is the same."""
    import torch._dynamo

    before = torch._dynamo.config.disable
    torch._dynamo.config.disable = True
    yield
    torch._dynamo.config.disable = before


@dataclass
class Batch:
    """What is read of a ScheduleBatch."""

    reqs: list[Any]
    logit_bias: Tensor | None = None
    has_grammar: bool = False
    device: str = "cpu"
    sampling_info: Any = field(init=False)

    def __post_init__(self) -> None:
        self.sampling_info = SimpleNamespace(logit_bias=self.logit_bias)


def request(**params: Any) -> Any:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**(DEFAULTS | params)),
        eos_token_ids={2},
        tokenizer=SimpleNamespace(additional_stop_token_ids={3}, eos_token_id=4),
    )


def trees(batch: int, nodes: int, seed: int) -> DraftTree:
    made = random_tree(batch, nodes, VOCAB, seed)
    linked = link_tree(made.parent_index, made.num_nodes, max_depth=made.max_depth)
    return DraftTree(
        tokens=made.draft_tokens,
        parent_index=made.parent_index,
        **linked._asdict(),
        log_q=torch.zeros(batch, nodes),
        num_nodes=made.num_nodes,
    )


def path_of(tree: DraftTree, b: int, node: int) -> list[int]:
    """Drafts from the root (excluded) to a node, walked along the parents."""
    path: list[int] = []
    while node > 0:
        path.insert(0, int(tree.tokens[b, node]))
        node = int(tree.parent_index[b, node])
    return path


def plain(logits: Tensor, req: Any, emitted: list[int], bias: Tensor | None) -> Tensor:
    """One step of plain decoding: the engine's penalizers after `emitted`, one token at a time."""
    from sglang.srt.sampling import penaltylib

    batch = Batch([req])
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=VOCAB,
        batch=batch,
        penalizers={
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
        },
    )
    for token in emitted:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    row = logits.clone()[None]
    orchestrator.apply(row, repeat=1)  # additive ones first, as in the overlapped scheduler
    return row[0] if bias is None else row[0] + bias


def expected(logits: Tensor, tree: DraftTree, batch: Batch, outputs: list[list[int]]) -> Tensor:
    want = logits.clone()
    for b, req in enumerate(batch.reqs):
        bias = None if batch.logit_bias is None else batch.logit_bias[b]
        for node in range(int(tree.num_nodes[b])):
            emitted = [*outputs[b], *path_of(tree, b, node)]
            want[b, node] = plain(logits[b, node], req, emitted, bias)
    return want


def window_wide(logits: Tensor, tree: DraftTree, batch: Batch, outputs: list[list[int]]) -> Tensor:
    """What a window with one penalty state gives: that of the root, at every node."""
    want = logits.clone()
    for b, req in enumerate(batch.reqs):
        bias = None if batch.logit_bias is None else batch.logit_bias[b]
        for node in range(int(tree.num_nodes[b])):
            want[b, node] = plain(logits[b, node], req, outputs[b], bias)
    return want


def adjusted(
    logits: Tensor, tree: DraftTree, batch: Batch, outputs: list[list[int]], ragged: bool = False
) -> Tensor:
    """What every node is given; dead nodes share their root's row where they are left out."""
    packed = pack_nodes(tree, ragged=ragged)
    values = logits.clone().view(-1, VOCAB)
    if packed.computed is not None:
        values = values[packed.computed]
    node_logits = NodeLogits(values, packed.rows)
    adjust_logits(node_logits, tree, batch, lambda i: outputs[i], packed.computed)
    return values[packed.rows]


def same(a: Tensor, b: Tensor, tree: DraftTree) -> bool:
    live = torch.arange(tree.num_draft_tokens) < tree.num_nodes[:, None]
    return bool(torch.allclose(a[live], b[live], atol=1e-5))


def case(seed: int, nodes: int, batch: int = 3) -> tuple[Tensor, DraftTree, list[list[int]]]:
    torch.manual_seed(seed)
    tree = trees(batch, nodes, seed)
    outputs = [[*torch.randint(VOCAB, (b,)).tolist(), int(tree.tokens[b, 0])] for b in range(batch)]
    return torch.randn(batch, nodes, VOCAB), tree, outputs


@pytest.mark.parametrize("params", SETTINGS, ids=lambda p: "+".join(p) if len(p) < 4 else "all")
@pytest.mark.parametrize("nodes", [1, 2, 7, 17])
@pytest.mark.parametrize("ragged", [False, True])
def test_every_node_is_penalised_for_its_own_path(
    params: dict[str, Any], nodes: int, ragged: bool
) -> None:
    logits, tree, outputs = case(nodes, nodes)
    batch = Batch([request(**params), request(), request(**params)])
    got = adjusted(logits, tree, batch, outputs, ragged)
    assert same(got, expected(logits, tree, batch, outputs), tree)


@pytest.mark.parametrize("params", SETTINGS[:-1], ids=lambda p: "+".join(p))
def test_one_penalty_state_for_the_window_is_told_apart(params: dict[str, Any]) -> None:
    """Control: the test above fails for the penalties of SGLang's own speculative workers."""
    logits, tree, outputs = case(5, 17)
    batch = Batch([request(**params)] * 3)
    relaxed = window_wide(logits, tree, batch, outputs)
    assert not same(relaxed, expected(logits, tree, batch, outputs), tree)


@pytest.mark.parametrize("ragged", [False, True])
def test_bias_is_added_after_the_penalties(ragged: bool) -> None:
    logits, tree, outputs = case(1, 7)
    bias = torch.randn(3, VOCAB) * 4
    batch = Batch([request(**ALL)] * 3, logit_bias=bias)
    got = adjusted(logits, tree, batch, outputs, ragged)
    assert same(got, expected(logits, tree, batch, outputs), tree)
    early = Batch([request(**ALL)] * 3)
    assert not same(got, adjusted(logits + bias[:, None], tree, early, outputs), tree)


def test_additive_penalties_come_before_the_scaling_one() -> None:
    logits = torch.full((1, 1, VOCAB), 0.5)
    tree = DraftTree.root_only(torch.tensor([6]))
    batch = Batch([request(presence_penalty=1.0, repetition_penalty=2.0)])
    got = adjusted(logits, tree, batch, [[6]])
    assert got[0, 0, 6] == (0.5 - 1.0) * 2.0
    assert got[0, 0, 5] == 0.5


def test_stop_tokens_are_blocked_until_the_path_is_long_enough() -> None:
    chain = torch.arange(-1, 4)[None]
    linked = link_tree(chain, torch.tensor([5]), max_depth=4)
    tree = DraftTree(
        torch.tensor([[6, 7, 8, 9, 10]]), chain, **linked._asdict(),
        log_q=torch.zeros(1, 5), num_nodes=torch.tensor([5]),
    )  # fmt: skip
    req = request(min_new_tokens=4, stop_token_ids={1, VOCAB, VOCAB + 9, -1})
    got = adjusted(torch.zeros(1, 5, VOCAB), tree, Batch([req]), [[5, 6]])
    blocked = (got[0] == float("-inf")).nonzero().tolist()
    assert blocked == [[node, stop] for node in (0, 1) for stop in (1, 2, 3, 4)]


def test_requests_without_a_tokenizer_are_penalised() -> None:
    req = request(min_new_tokens=2)
    req.tokenizer, req.eos_token_ids = None, None
    logits = torch.zeros(1, 1, VOCAB)
    tree = DraftTree.root_only(torch.tensor([6]))
    assert torch.equal(adjusted(logits, tree, Batch([req]), [[6]]), logits)


def test_outputs_are_read_for_penalised_requests_alone() -> None:
    """Reading waits for the device."""
    logits, tree, outputs = case(3, 7)
    batch = Batch([request(), request(presence_penalty=1.0), request()])
    asked: list[int] = []

    def read(i: int) -> list[int]:
        asked.append(i)
        return outputs[i]

    packed = pack_nodes(tree, ragged=False)
    adjust_logits(NodeLogits(logits.view(-1, VOCAB), packed.rows), tree, batch, read)
    assert asked == [1]
    assert needs_output_history(batch)
    assert not needs_output_history(Batch([request()]))


class Grammar:
    """Masks are dense here: False forbids."""

    def apply_vocab_mask(self, logits: Tensor, vocab_mask: Tensor) -> None:
        logits.masked_fill_(~vocab_mask, float("-inf"))


@pytest.mark.parametrize("ragged", [False, True])
def test_the_grammar_masks_each_node_and_no_bias_lifts_it(
    monkeypatch: pytest.MonkeyPatch, ragged: bool
) -> None:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask

    logits, tree, outputs = case(4, 7)
    allowed = torch.rand(3 * 7, VOCAB) > 0.5
    seen: dict[str, Any] = {}

    def build(**arguments: Any) -> Any:
        seen.update(arguments)
        return GrammarMask(Grammar(), allowed)

    monkeypatch.setattr(sgl, "build_grammar_vocab_mask", build, raising=False)
    bias = torch.full((3, VOCAB), 50.0)
    batch = Batch([request(**ALL)] * 3, logit_bias=bias, has_grammar=True)
    got = adjusted(logits, tree, batch, outputs, ragged)
    want = expected(logits, tree, batch, outputs)
    assert same(got, want.masked_fill(~allowed.view(3, 7, VOCAB), float("-inf")), tree)
    handed = (tree.retrieve_next_token, tree.retrieve_next_sibling, tree.tokens)
    assert all(map(torch.equal, seen["tree"].resolve(), handed))
