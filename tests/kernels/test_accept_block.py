"""Block verification: the vectorised op equals the loop, at the edges of its numbers as well."""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.accept_block import accept_block as reference
from specstack_kernels.reference.accept_block import take_prefix
from specstack_kernels.testing_chains import random_chain
from specstack_kernels.torch_ops.accept_block import accept_block
from specstack_kernels.torch_ops.accept_greedy import accept_greedy

SHAPES = [(1, 1, 2), (3, 7, 2), (4, 17, 3), (8, 5, 40)]
"""(B, N, V)."""
SHAPE_IDS = ["B{}-N{}-V{}".format(*s) for s in SHAPES]
LAST_UNIFORM = 1.0 - 2.0**-53


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("cut", [0, 2])
@pytest.mark.parametrize("seed", range(8))
def test_equals_the_definition(batch, nodes, vocab, cut, seed):
    drafts, num_nodes, law, logits, sampling, uniforms = random_chain(batch, nodes, vocab, seed)
    inputs = drafts, num_nodes, *law, *logits, *sampling, uniforms
    max_depth = max(nodes - 1 - cut, 0)
    actual = accept_block(*inputs, max_depth=max_depth)
    assert_same(actual, reference(*inputs, max_depth=max_depth))


def test_prefixes_of_all_lengths_occur():
    """Control of the one above: the inputs reach every branch."""
    lengths = set()
    for seed in range(8):
        drafts, num_nodes, law, logits, sampling, uniforms = random_chain(8, 5, 40, seed)
        walk = accept_block(drafts, num_nodes, *law, *logits, *sampling, uniforms, max_depth=4)
        lengths |= set(walk.accept_lens.tolist())
    assert lengths == {1, 2, 3, 4, 5}


def test_top_k_1_degenerates_to_greedy_acceptance():
    for seed in range(8):
        drafts, num_nodes, law, logits, sampling, uniforms = random_chain(4, 17, 3, seed)
        predict = logits[0].argmax(dim=-1)[logits[1]]
        drafts[:, 1:5] = predict[:, :4]
        sampling = sampling._replace(top_k=torch.ones_like(sampling.top_k))
        law[1].fill_(torch.nan)
        inputs = drafts, num_nodes, *law, *logits, *sampling, uniforms * torch.nan
        parents = torch.arange(-1, 16).expand(4, -1)
        expected = accept_greedy(drafts, parents, num_nodes, predict, max_depth=16)
        assert_same(accept_block(*inputs, max_depth=16), expected)
        assert_same(reference(*inputs, max_depth=16), expected)


@pytest.mark.parametrize("op", [accept_block, reference])
def test_what_does_not_count_may_be_anything(op):
    """Uniforms but the first, dead nodes, the law of a chain's last node."""
    drafts, num_nodes, law, logits, sampling, uniforms = random_chain(4, 17, 3, 3)
    settings = *logits, *sampling
    expected = op(drafts, num_nodes, *law, *settings, uniforms, max_depth=16)
    is_dead = torch.arange(17) >= num_nodes[:, None]
    has_no_child = torch.arange(17) >= num_nodes[:, None] - 1
    drafts[is_dead] = -7
    law[0][has_no_child] = 0
    law[1][has_no_child] = torch.nan
    uniforms[:, 1:] = torch.nan
    assert_same(op(drafts, num_nodes, *law, *settings, uniforms, max_depth=16), expected)


def verify(q, drafts, uniform, logits=(0.0, 0.0, 0.0)):
    """A chain with the same p and q at every node: length and last token."""
    nodes = len(drafts) + 1
    settings = [torch.tensor([x]) for x in (1.0, 1 << 30, 1.0, 0.0)]
    walks = [
        op(
            torch.tensor([[0, *drafts]]),
            torch.tensor([nodes]),
            torch.arange(3).expand(1, nodes, 3),
            torch.tensor(q, dtype=torch.float64).expand(1, nodes, 3),
            torch.tensor([logits]),
            torch.zeros((1, nodes), dtype=torch.int64),
            *settings,
            torch.tensor([[uniform]], dtype=torch.float64),
            max_depth=nodes - 1,
        )
        for op in (accept_block, reference)
    ]
    assert_same(*walks)
    length = int(walks[0].accept_lens)
    return length - 1, int(walks[0].emitted[0, length - 1])


@pytest.mark.parametrize("scale", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST_UNIFORM])
def test_drafts_from_the_targets_own_law_are_all_accepted(scale, uniform):
    assert verify([scale / 3] * 3, [1, 0, 2], uniform)[0] == 3


def test_a_draft_that_cannot_have_been_drawn_ends_the_chain():
    """The token after the prefix before it is a plain sample of p."""
    assert verify([0.5, 0.5, 0.0], [2, 0], 0.5) == (0, 1)
    assert verify([0.5, 0.5, 0.0], [2, 0], LAST_UNIFORM) == (0, 2)
    length, _ = verify([0.5, 0.5, 0.0], [0, 2, 1], 0.0)
    assert length == 1


def test_a_draft_that_the_target_excludes_ends_the_prefix():
    assert verify([0.4, 0.3, 0.3], [1, 0], 0.0, (0.0, -torch.inf, 0.0)) == (0, 0)


def test_a_likely_draft_makes_up_for_an_unlikely_one_before_it():
    """p(0) / q(0) = 1 / 2, then p(1) / q(1) = 2: token by token half of the chains would end."""
    p = torch.tensor([[0.25, 0.75, 0.0], [0.25, 0.5, 0.25], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    laws = list(p.double()), list(q.double())
    assert take_prefix(*laws, [0, 1], LAST_UNIFORM) == (2, 0)
    assert take_prefix(*laws, [0, 0], 0.99)[0] < 2
