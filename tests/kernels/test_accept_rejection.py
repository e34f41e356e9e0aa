"""Recursive rejection: the vectorised op equals the loop, at the edges of its numbers as well."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.accept_rejection import accept_rejection as reference
from specstack_kernels.reference.accept_rejection import take_token
from specstack_kernels.testing import TREE_SHAPES, random_sampling, random_tree
from specstack_kernels.torch_ops.accept_rejection import accept_rejection
from specstack_kernels.torch_ops.sample_and_walk import sample_and_walk

SHAPES = [pytest.param(*s, id="B{}-N{}-V{}".format(*s)) for s in [*TREE_SHAPES, (3, 40, 17)]]
LAST_UNIFORM = 1.0 - 2.0**-53
PLAIN = [torch.tensor([x]) for x in (1.0, 1 << 30, 1.0, 0.0)]


def random_law(batch, nodes, vocab, seed):
    """Some candidates impossible, some tokens no candidates, sums a little off 1."""
    generator = torch.Generator().manual_seed(seed)
    num_candidates = max(1, vocab - seed % 2)
    tokens = torch.rand((batch, nodes, vocab), generator=generator).argsort(dim=-1)
    probs = torch.rand((batch, nodes, num_candidates), generator=generator) ** 4
    probs *= torch.rand(probs.shape, generator=generator) < 0.9
    probs[..., 0] += 0.1
    return tokens[..., :num_candidates], probs / probs.sum(dim=-1, keepdim=True) * 1.001


def random_inputs(batch, nodes, vocab, seed):
    *tree, max_depth = random_tree(batch, nodes, vocab, seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((batch * nodes, vocab), generator=generator) * 2
    rows = torch.randperm(batch * nodes, generator=generator).view(batch, nodes)
    uniforms = torch.rand((batch, max_depth + 1), generator=generator, dtype=torch.float64)
    law = random_law(batch, nodes, vocab, seed)
    return tree, law, (logits, rows), random_sampling(batch, vocab, seed), uniforms, max_depth


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES)
@pytest.mark.parametrize("max_children", [1, 2, 63])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition(batch, nodes, vocab, seed, max_children):
    tree, law, logits, sampling, uniforms, max_depth = random_inputs(batch, nodes, vocab, seed)
    limits = {"max_depth": max_depth, "max_children": max_children}
    actual = accept_rejection(*tree, *law, *logits, *sampling, uniforms, **limits)
    assert_same(actual, reference(*tree, *law, *logits, *sampling, uniforms, **limits))


@pytest.mark.parametrize("seed", range(8))
def test_without_offers_it_samples_and_walks(seed):
    tree, law, logits, sampling, uniforms, max_depth = random_inputs(4, 33, 3, seed)
    walk = accept_rejection(
        *tree, *law, *logits, *sampling, uniforms, max_depth=max_depth, max_children=0
    )
    assert_same(walk, sample_and_walk(*tree, *logits, *sampling, uniforms, max_depth=max_depth))


@pytest.mark.parametrize("op", [accept_rejection, reference])
def test_what_does_not_count_may_be_anything(op):
    """Laws of leaves and of greedy requests, dead nodes, uniforms beyond what was emitted."""
    tree, law, logits, sampling, uniforms, max_depth = random_inputs(4, 33, 3, 1)
    limits = {"max_depth": max_depth, "max_children": 33}
    sampling.top_k[0] = 1
    expected = op(*tree, *law, *logits, *sampling, uniforms, **limits)
    tokens, parents, num_nodes = tree
    is_dead = torch.arange(33) >= num_nodes[:, None]
    has_child = torch.zeros_like(is_dead)
    for node in range(1, 33):
        has_child[torch.arange(4), parents[:, node]] |= ~is_dead[:, node]
    has_child[0] = False
    law[1][~has_child] = torch.nan
    law[0][~has_child] = 0
    tokens[is_dead] = -7
    for b, length in enumerate(expected.accept_lens):
        uniforms[b, 0 if b == 0 else int(length) :] = torch.nan
    assert_same(op(*tree, *law, *logits, *sampling, uniforms, **limits), expected)


def offer(q, draft, uniform, logits=(0.0, 0.0, 0.0)):
    """One node with one draft: whether it is taken, and the token that is emitted there."""
    walks = [
        op(
            torch.tensor([[0, draft]]),
            torch.tensor([[-1, 0]]),
            torch.tensor([2]),
            torch.tensor([[[0, 1, 2], [0, 0, 0]]]),
            torch.tensor([[q, [0.0, 0.0, 0.0]]], dtype=torch.float64),
            torch.tensor([logits, logits]),
            torch.tensor([[0, 1]]),
            *PLAIN,
            torch.tensor([[uniform, 0.0]], dtype=torch.float64),
            max_depth=1,
            max_children=1,
        )
        for op in (accept_rejection, reference)
    ]
    assert_same(*walks)
    return int(walks[0].accept_lens) == 2, int(walks[0].emitted[0, 0])


@pytest.mark.parametrize("scale", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST_UNIFORM])
def test_a_draft_from_the_targets_own_law_is_always_taken(scale, uniform):
    assert offer([scale / 3] * 3, 1, uniform) == (True, 1)


def test_a_draft_from_nearly_the_targets_law_leaves_a_residual_that_can_be_drawn_from():
    for epsilon in (1e-3, 1e-7, 1e-12, 1e-16, 1e-17):
        q = [1 / 3 + epsilon, 1 / 3 - epsilon / 2, 1 / 3 - epsilon / 2]
        is_taken, token = offer(q, 0, LAST_UNIFORM)
        assert is_taken == (token == 0)
        assert token in (0, 1, 2)


def test_a_draft_that_cannot_have_been_drawn_is_not_offered():
    """The token is a plain sample of p; if it is the draft's, the walk goes there."""
    for uniform, token in ((0.1, 0), (0.5, 1), (LAST_UNIFORM, 2)):
        assert offer([1.0, 0.0, 0.0], 1, uniform) == (token == 1, token)


def test_a_draft_that_the_target_excludes_is_refused():
    assert offer([0.0, 1.0, 0.0], 1, 0.0, (0.0, -torch.inf, 0.0)) == (False, 0)


def test_when_the_law_runs_out_the_rest_is_sampled():
    """Both drafts of a law of one token: the second was not drawn from anything."""
    p = torch.tensor([0.2, 0.3, 0.5])
    q = torch.tensor([1.0, 0.0, 0.0])
    assert take_token(p, q, [0, 1], 0.1) == 0
    # Refused: what is left is [0, 0.3, 0.5] / 0.8, of which token 1 takes 0.375.
    assert take_token(p, q, [0, 1], 0.2 + 0.8 * 0.374) == 1
    assert take_token(p, q, [0, 1], 0.2 + 0.8 * 0.376) == 2


def test_a_smaller_max_depth_cuts_the_walk():
    tree, law, logits, sampling, uniforms, max_depth = random_inputs(4, 33, 3, 2)
    limits = {"max_children": 33}
    whole = accept_rejection(
        *tree, *law, *logits, *sampling, uniforms, max_depth=max_depth, **limits
    )
    cut = accept_rejection(*tree, *law, *logits, *sampling, uniforms[:, :2], max_depth=1, **limits)
    assert torch.equal(cut.accept_index, whole.accept_index[:, :2])
    assert torch.equal(cut.emitted, whole.emitted[:, :2])
    assert torch.equal(cut.accept_lens, whole.accept_lens.clamp(max=2))
