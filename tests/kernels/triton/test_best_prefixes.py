"""The Triton heap equals the definition; exactly, as both add the same float32 in the same order.

What no prefix can reach is poisoned: tokens of missing candidates, ranks and depths beyond S.
"""

from __future__ import annotations

import pytest
import torch

from specstack_kernels.reference.best_prefixes import best_prefixes as reference
from specstack_kernels.testing_candidates import random_marginals
from specstack_kernels.triton.best_prefixes import MAX_DRAFTS, best_prefixes

SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 5, 0),
    (3, 5, 7, 13),
    (2, 16, 4, 33),
    (2, 6, 64, 64),
    (2, 3, 2, 50),  # 14 prefixes
    (1, 7, 9, 65),
    (2, 20, 20, 8),  # more depths and ranks than drafts
]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "depths", "width", "drafts"), SHAPES)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_equals_the_heap(batch, depths, width, drafts, coarse, dead):
    marginals = random_marginals(batch, depths, width, drafts, coarse=coarse, dead=dead)
    expected = reference(*marginals, drafts)
    marginals.log_q[:, drafts:] = torch.nan
    marginals.log_q[:, :, drafts:] = torch.nan
    assert_equal(best_prefixes(*marginals, drafts), expected)


def test_a_full_budget():
    marginals = random_marginals(1, 8, 256, 0)
    assert_equal(best_prefixes(*marginals, 256), reference(*marginals, 256))


def test_a_long_chain_reaches_the_last_depth():
    """One candidate per depth: every pop is a child of the last."""
    tokens, log_q = torch.arange(200).view(1, 200, 1), torch.full((1, 200, 1), -0.01)
    assert_equal(best_prefixes(tokens, log_q, 200), reference(tokens, log_q, 200))


def test_no_candidate_anywhere():
    tokens, log_q = torch.full((2, 3, 4), 7), torch.full((2, 3, 4), -torch.inf)
    chosen = best_prefixes(tokens, log_q, 5)
    assert_equal(chosen, reference(tokens, log_q, 5))
    assert chosen.tokens.tolist() == [[0] * 5] * 2


def test_strided_inputs():
    tokens, log_q = random_marginals(2, 6, 5, 0)
    expected = reference(tokens[:, 1::2].contiguous(), log_q[:, 1::2].contiguous(), 9)
    assert_equal(best_prefixes(tokens[:, 1::2], log_q[:, 1::2], 9), expected)


def test_a_changed_law_changes_the_prefixes():
    tokens, log_q = random_marginals(2, 4, 6, 0, dead=False)
    expected = reference(tokens, log_q, 12)
    changed = best_prefixes(tokens, log_q.flip(1), 12)
    assert not torch.equal(changed.tokens, expected.tokens)
    assert not torch.equal(changed.path_log_q, expected.path_log_q)


def test_more_drafts_than_an_entry_has_room_for_are_ranked_all_the_same():
    marginals = random_marginals(2, 2, MAX_DRAFTS, 0)
    assert_equal(best_prefixes(*marginals, MAX_DRAFTS + 1), reference(*marginals, MAX_DRAFTS + 1))
