"""Block verification in Triton: equals the loop, and reads chains only.

Chances, cuts and cells agree but for about 1e-6 at their borders; seeds are fixed, so that no case
here stands on one by accident.
"""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.accept_block import accept_block as reference
from specstack_kernels.testing_chains import random_chain
from specstack_kernels.triton import draft_laws as laws_module
from specstack_kernels.triton import filter_probs as filter_module
from specstack_kernels.triton.accept_block import accept_block

SHAPES = [(1, 1, 2), (3, 7, 2), (4, 9, 3), (6, 5, 40)]
"""(B, N, V)."""
IDS = ["B{}-N{}-V{}".format(*shape) for shape in SHAPES]
POISON = -0x5EADBEEF0BAD


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), SHAPES, ids=IDS)
@pytest.mark.parametrize("cut", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(batch, nodes, vocab, cut, seed):
    drafts, num_nodes, law, logits, sampling, uniforms = random_chain(batch, nodes, vocab, seed)
    inputs = drafts, num_nodes, *law, *logits, *sampling, uniforms
    max_depth = max(nodes - 1 - cut, 0)
    actual = accept_block(*inputs, max_depth=max_depth)
    assert_same(actual, reference(*inputs, max_depth=max_depth))


def test_a_depth_beyond_the_nodes_pads():
    drafts, num_nodes, law, logits, sampling, uniforms = random_chain(3, 7, 2, 1)
    uniforms = torch.cat([uniforms, uniforms], dim=1)
    inputs = drafts, num_nodes, *law, *logits, *sampling, uniforms
    assert_same(accept_block(*inputs, max_depth=9), reference(*inputs, max_depth=9))


@pytest.mark.parametrize("seed", range(2))
def test_rows_and_laws_of_many_blocks(seed, monkeypatch):
    monkeypatch.setattr(filter_module, "MAX_BLOCK", 16)
    monkeypatch.setattr(laws_module, "MAX_PAIRS", 16)
    drafts, num_nodes, law, logits, sampling, uniforms = random_chain(3, 5, 70, seed)
    inputs = drafts, num_nodes, *law, *logits, *sampling, uniforms
    assert_same(accept_block(*inputs, max_depth=4), reference(*inputs, max_depth=4))


@pytest.mark.parametrize("seed", range(3))
def test_only_chains_are_read(seed):
    drafts, num_nodes, law, (logits, rows), sampling, uniforms = random_chain(4, 9, 3, seed)
    inputs = drafts, num_nodes, *law, logits, rows, *sampling, uniforms
    expected = reference(*inputs, max_depth=8)
    index = torch.arange(9)
    is_dead = index >= num_nodes[:, None]
    is_idle = (index >= num_nodes[:, None] - 1) | (sampling.top_k == 1)[:, None]
    read = torch.zeros(len(logits), dtype=torch.bool).index_fill(0, rows[~is_dead], True)
    actual = accept_block(
        drafts.masked_fill(is_dead, POISON),
        num_nodes,
        law[0].masked_fill(is_idle[:, :, None], POISON),
        law[1].masked_fill(is_idle[:, :, None], torch.nan),
        logits.masked_fill(~read[:, None], torch.nan),
        rows.masked_fill(is_dead, POISON),
        *sampling,
        uniforms.masked_fill(index > 0, torch.nan),
        max_depth=8,
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53, 1.0])
def test_drafts_from_nearly_the_targets_law(epsilon, uniform):
    """Accepted, or a token that p has: never one beyond the vocabulary or none."""
    one = torch.ones(1)
    q = torch.tensor([1 / 3 - epsilon, 1 / 3 + epsilon, 1 / 3], dtype=torch.float64)
    walk = accept_block(
        torch.tensor([[0, 1, 1]]),
        torch.tensor([3]),
        torch.arange(3).expand(1, 3, -1),
        q.expand(1, 3, -1),
        torch.tensor([[0.0, 0.0, 0.0, -torch.inf]]),
        torch.zeros((1, 3), dtype=torch.int64),
        one, torch.tensor([1 << 30]), one, 0 * one,
        torch.tensor([[uniform]], dtype=torch.float64),
        max_depth=2,
    )  # fmt: skip
    length = int(walk.accept_lens)
    assert 0 <= int(walk.emitted[0, length - 1]) < 3
    assert length == 3 or uniform > 0.9


def test_other_laws_are_noticed():
    """Control."""
    drafts, num_nodes, law, logits, sampling, uniforms = random_chain(6, 5, 40, 0)
    sampling = sampling._replace(top_k=torch.full_like(sampling.top_k, 1 << 30))
    rest = *logits, *sampling, uniforms
    expected = reference(drafts, num_nodes, *law, *rest, max_depth=4)
    other = law[0], law[1].roll(1, dims=2)
    actual = accept_block(drafts, num_nodes, *other, *rest, max_depth=4)
    assert not torch.equal(actual.emitted, expected.emitted)


def test_no_requests():
    none, reals = torch.zeros((0, 5), dtype=torch.int64), torch.zeros(0)
    walk = accept_block(
        none, none[:, 0], none[..., None], torch.zeros(0, 5, 1), torch.zeros(3, 7), none,
        reals, none[:, 0], reals, reals, torch.zeros(0, 4), max_depth=3,
    )  # fmt: skip
    assert walk.emitted.shape == (0, 4)
