"""Recursive rejection in Triton: equals the loop, and reads what was visited only.

Chances, cuts and cells agree but for about 1e-6 at their borders; seeds are fixed, so that no case
here stands on one by accident.
"""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.accept_rejection import accept_rejection as reference
from specstack_kernels.testing import TREE_SHAPES, random_sampling, random_tree
from specstack_kernels.triton import draft_laws as laws_module
from specstack_kernels.triton import filter_probs as filter_module
from specstack_kernels.triton.accept_rejection import accept_rejection
from specstack_kernels.triton.sample_and_walk import sample_and_walk

SHAPES = [*TREE_SHAPES, (3, 9, 300)]
IDS = ["B{}-N{}-V{}".format(*shape) for shape in SHAPES]
POISON = -0x5EADBEEF0BAD


def random_inputs(batch, nodes, vocab, seed):
    """Drafts as they come, under laws near the target's; some candidates are impossible."""
    *tree, max_depth = random_tree(batch, nodes, vocab, seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((batch * nodes, vocab), generator=generator) * 2
    rows = torch.randperm(batch * nodes, generator=generator).view(batch, nodes)
    uniforms = torch.rand((batch, max_depth + 1), generator=generator, dtype=torch.float64)
    num_candidates = max(1, vocab - seed % 2)
    tokens = torch.rand((batch, nodes, vocab), generator=generator).argsort(dim=-1)
    tokens = tokens[..., :num_candidates]
    noise = torch.randn(tokens.shape, generator=generator)
    probs = torch.softmax(logits[rows].gather(2, tokens) + noise, dim=-1)
    probs *= torch.rand(probs.shape, generator=generator) < 0.9
    probs[..., 0] += 0.1
    law = tokens, probs / probs.sum(dim=-1, keepdim=True) * 0.999
    return tree, law, (logits, rows), random_sampling(batch, vocab, seed), uniforms, max_depth


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES, ids=IDS)
@pytest.mark.parametrize("max_children", [1, 63])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(batch, nodes, vocab, seed, max_children):
    tree, law, logits, sampling, uniforms, max_depth = random_inputs(batch, nodes, vocab, seed)
    limits = {"max_depth": max_depth, "max_children": max_children}
    actual = accept_rejection(*tree, *law, *logits, *sampling, uniforms, **limits)
    assert_same(actual, reference(*tree, *law, *logits, *sampling, uniforms, **limits))


def star(seed):
    """7 siblings drawn from a law far from the target's, so that p and q shrink several times."""
    generator = torch.Generator().manual_seed(seed)
    batch, vocab = 8, 12
    logits = torch.randn((batch, vocab), generator=generator)
    q = torch.softmax(logits + 2 * torch.randn((batch, vocab), generator=generator), dim=-1)
    tokens = torch.zeros((batch, 8), dtype=torch.int64)
    gumbel = -torch.log(-torch.log(torch.rand((batch, vocab), generator=generator)))
    tokens[:, 1:] = (q.log() + gumbel).topk(7, dim=1).indices
    law = torch.arange(vocab).expand(batch, 8, -1), q[:, None].expand(-1, 8, -1)
    rows = torch.arange(batch)[:, None].expand(-1, 8)
    settings = [torch.tensor(x).expand(batch) for x in (0.8, 1 << 30, 1.0, 0.0)]
    uniforms = 1 - torch.rand((batch, 2), generator=generator, dtype=torch.float64) ** 3
    parents = torch.tensor([-1] + [0] * 7).expand(batch, -1)
    return (tokens, parents, torch.full((batch,), 8)), law, (logits, rows), settings, uniforms


STAR = {"max_depth": 1, "max_children": 7, "use_top_k_top_p": False}


@pytest.mark.parametrize("seed", range(3))
def test_many_siblings_under_one_uniform(seed):
    tree, law, logits, sampling, uniforms = star(seed)
    inputs = *tree, *law, *logits, *sampling, uniforms
    assert_same(accept_rejection(*inputs, **STAR), reference(*inputs, **STAR))


def test_rows_and_laws_of_many_blocks(monkeypatch):
    monkeypatch.setattr(filter_module, "MAX_BLOCK", 32)
    monkeypatch.setattr(laws_module, "MAX_PAIRS", 16)
    tree, law, logits, sampling, uniforms, max_depth = random_inputs(3, 9, 150, 1)
    limits = {"max_depth": max_depth, "max_children": 8}
    actual = accept_rejection(*tree, *law, *logits, *sampling, uniforms, **limits)
    assert_same(actual, reference(*tree, *law, *logits, *sampling, uniforms, **limits))


@pytest.mark.parametrize("seed", range(3))
def test_only_what_was_visited_is_read(seed):
    tree, law, (logits, rows), sampling, uniforms, max_depth = random_inputs(4, 33, 3, seed)
    limits = {"max_depth": max_depth, "max_children": 32}
    expected = reference(*tree, *law, logits, rows, *sampling, uniforms, **limits)
    (tokens, parents, live), (law_tokens, law_probs) = tree, law
    is_dead = torch.arange(33) >= live[:, None]
    is_visited = torch.zeros((4, 34), dtype=torch.bool)
    is_visited = is_visited.scatter(1, expected.accept_index % 34, True)[:, :33]
    has_child = torch.zeros_like(is_dead)
    for node in range(1, 33):
        has_child[torch.arange(4), parents[:, node].clamp(min=0)] |= ~is_dead[:, node]
    is_idle = (~is_visited | ~has_child | (sampling.top_k == 1)[:, None])[:, :, None]
    read = torch.zeros(len(logits), dtype=torch.bool).index_fill(0, rows[is_visited], True)
    is_later = torch.arange(max_depth + 1) >= expected.accept_lens[:, None]
    actual = accept_rejection(
        tokens.masked_fill(is_dead, POISON),
        parents.masked_fill(is_dead, POISON),
        live,
        law_tokens.masked_fill(is_idle, POISON),
        law_probs.masked_fill(is_idle, torch.nan),
        logits.masked_fill(~read[:, None], torch.nan),
        rows.masked_fill(is_dead, POISON),
        *sampling,
        uniforms.masked_fill(is_later, torch.nan),
        **limits,
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("seed", range(3))
def test_without_offers_it_samples_and_walks(seed):
    tree, law, logits, sampling, uniforms, max_depth = random_inputs(4, 33, 3, seed)
    walk = accept_rejection(
        *tree, *law, *logits, *sampling, uniforms, max_depth=max_depth, max_children=0
    )
    assert_same(walk, sample_and_walk(*tree, *logits, *sampling, uniforms, max_depth=max_depth))


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53, 1.0])
def test_a_draft_from_nearly_the_targets_law(epsilon, uniform):
    """Taken, or a token that p has: never one beyond the vocabulary or none."""
    one = torch.ones(1)
    walk = accept_rejection(
        torch.tensor([[0, 1]]),
        torch.tensor([[-1, 0]]),
        torch.tensor([2]),
        torch.tensor([[[0, 1, 2], [0, 0, 0]]]),
        torch.tensor([[[1 / 3 - epsilon, 1 / 3 + epsilon, 1 / 3], [0.0] * 3]], dtype=torch.float64),
        torch.tensor([[0.0, 0.0, 0.0, -torch.inf]]),
        torch.zeros((1, 2), dtype=torch.int64),
        one, torch.tensor([1 << 30]), one, 0 * one,
        torch.tensor([[uniform, 0.0]], dtype=torch.float64),
        max_depth=1,
        max_children=1,
    )  # fmt: skip
    is_taken = int(walk.accept_lens) == 2
    assert is_taken == (int(walk.emitted[0, 0]) == 1)
    assert 0 <= int(walk.emitted[0, 0]) < 3
    assert is_taken or (uniform > 0.9 and epsilon > 0)


def test_other_laws_are_noticed():
    """Control."""
    tree, law, logits, sampling, uniforms = star(0)
    expected = reference(*tree, *law, *logits, *sampling, uniforms, **STAR)
    other = law[0], law[1].roll(1, dims=2)
    actual = accept_rejection(*tree, *other, *logits, *sampling, uniforms, **STAR)
    assert not torch.equal(actual.emitted, expected.emitted)


def test_no_requests():
    none, reals = torch.zeros((0, 5), dtype=torch.int64), torch.zeros(0)
    walk = accept_rejection(
        none, none, none[:, 0], none[..., None], torch.zeros(0, 5, 1), torch.zeros(3, 7), none,
        reals, none[:, 0], reals, reals, torch.zeros(0, 4), max_depth=3, max_children=1,
    )  # fmt: skip
    assert walk.emitted.shape == (0, 4)
