"""The n-gram drafter: finds what is there, proposes valid tries, forgets what it must."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstack.drafters.continuations import Continuations
from specstack.drafters.ngram import NgramDrafter, match_weight
from specstack.drafters.shared_history import SharedHistory
from specstack.drafters.suffix_index import SEPARATOR, SuffixIndex
from specstack.round import Speculator
from specstack.trees.chain import ChainBuilder
from specstack.verify.greedy import GreedyRule

texts = st.lists(st.integers(0, 3), min_size=0, max_size=200)


def common_suffix_len(a, b, most):
    n = 0
    while n < min(len(a), len(b), most) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def index_of(tokens, min_match=2, max_match=16):
    index = SuffixIndex(min_match, max_match)
    index.extend(tokens)
    return index


@given(texts, st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_search_finds_every_occurrence(tokens, min_match, extra):
    max_match = min_match + extra
    index = index_of(tokens, min_match, max_match)
    found = index.find_end(1000)
    expected = {
        end: n
        for end in range(1, len(tokens))
        if (n := common_suffix_len(tokens[:end], tokens, max_match)) >= min_match
    }
    assert {o.position: o.match_len for o in found} == expected


@given(texts, texts)
@settings(max_examples=100, deadline=None)
def test_search_for_a_foreign_context_finds_every_occurrence(tokens, context):
    found = index_of(tokens).find(context, limit=1000)
    expected = {
        end: n
        for end in range(1, len(tokens) + 1)
        if (n := common_suffix_len(tokens[:end], context, 16)) >= 2
    }
    assert {o.position: o.match_len for o in found} == expected


@given(texts, st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_search_prefers_long_then_recent_matches(tokens, limit):
    """Lengths are told apart in doubling steps; within one, the recent occurrence wins."""
    index = index_of(tokens)
    found = index.find_end(limit)
    every = index.find_end(1000)
    assert found == every[:limit]
    ranks = [(-sum(o.match_len >= n for n in (2, 4, 8)), -o.position) for o in found]
    assert ranks == sorted(ranks)


@given(st.lists(texts, max_size=5), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_chunks_of_any_size_build_the_same_index(chunks, min_match):
    whole = index_of([], min_match)
    for token in [token for chunk in chunks for token in chunk]:
        whole.extend([token])
    pieces = index_of([], min_match)
    for chunk in chunks:
        pieces.extend(chunk)
    assert vars(whole) == vars(pieces)


def propose(tokens, budget, **options):
    drafter = NgramDrafter(**{"max_depth": 8, **options})
    drafter.begin(0, tokens)
    return drafter.continue_slots([0], budget)


@given(texts, st.integers(1, 20), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_proposals_are_valid_tries_in_order(tokens, budget, depth):
    proposal = propose(tokens, budget, max_depth=depth)
    children, cumulative, depths = set(), [], []
    rows = zip(
        proposal.tokens[0].tolist(),
        proposal.parent_index[0].tolist(),
        proposal.log_q[0].double().tolist(),
        strict=True,
    )
    for i, (token, parent, log_q) in enumerate(rows):
        assert -1 <= parent < i
        assert (parent, token) not in children
        assert -torch.inf < log_q < 0
        children.add((parent, token))
        cumulative.append(log_q + (cumulative[parent] if parent >= 0 else 0.0))
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    assert all(a >= b - 1e-5 for a, b in pairwise(cumulative))
    assert max(depths, default=0) <= depth


@given(texts, st.integers(1, 10))
@settings(max_examples=100, deadline=None)
def test_a_budget_takes_the_best_nodes_of_the_whole_trie(tokens, budget):
    index = index_of(tokens)
    occurrences = index.find_end(16)
    weights = [match_weight(n) for n in range(17)]
    few = Continuations(index.tokens, weights, max_depth=4)
    few.take_best(occurrences, budget)
    whole = Continuations(index.tokens, weights, max_depth=4)
    whole.take_best(occurrences, 10**6)
    assert few.candidates.tokens == whole.candidates.tokens[:budget]
    assert few.candidates.log_q == whole.candidates.log_q[:budget]


def test_the_estimate_is_the_documented_formula():
    # "1 2" occurred before 3 (twice, once with 9 in front as now) and before 4.
    tokens = [9, 1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 3, 9, 1, 2]
    proposal = propose(tokens, budget=2, max_depth=1)
    short, long = match_weight(2), match_weight(3)
    total = 2 + 2 * short + long
    assert proposal.tokens.tolist() == [[3, 4]]
    expected = torch.tensor([[(short + long) / total, short / total]]).log()
    torch.testing.assert_close(proposal.log_q, expected)


def test_longer_matches_weigh_more():
    weights = [match_weight(n) for n in range(1, 33)]
    assert all(0 < a <= b for a, b in pairwise(weights))


def test_the_recent_occurrence_wins_a_tie():
    proposal = propose([1, 2, 3, 5, 1, 2, 4, 6, 1, 2], budget=2, max_depth=1)
    assert proposal.tokens.tolist() == [[4, 3]]


def test_a_loop_continues_beyond_the_present():
    proposal = propose([5, 6, 7, 5, 6, 7, 5, 6], budget=8, max_depth=8, max_occurrences=1)
    assert proposal.tokens.tolist() == [[7, 5, 6, 7, 5, 6, 7, 5]]


def test_proposals_hold_the_most_probable_chain_beside_the_best_nodes():
    rng = random.Random(0)
    tokens = [rng.randrange(3) for _ in range(300)]
    proposal = propose(tokens, budget=6, max_depth=6)
    node, length = -1, 0
    while True:
        is_child = proposal.parent_index[0] == node
        if not is_child.any():
            break
        node = int(proposal.log_q[0].masked_fill(~is_child, -torch.inf).argmax())
        length += 1
    assert length == 6


def test_a_slot_without_a_match_gets_an_empty_row():
    drafter = NgramDrafter(max_depth=4)
    drafter.begin(3, [1, 2, 3])
    drafter.begin(5, [1, 2, 3, 1, 2])
    proposal = drafter.continue_slots([3, 5], 4)
    assert (proposal.log_q[0] == -torch.inf).all()
    assert proposal.tokens[1].tolist() == [3, 1, 2, 3]
    assert drafter.continue_slots([3], 4).tokens.shape == (1, 0)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 1, 1]])
def test_short_histories_are_fine(tokens):
    assert propose(tokens, 3).tokens.shape == (1, 3 if len(tokens) == 3 else 0)


def test_budget_zero_touches_nothing():
    drafter = NgramDrafter(max_depth=4)
    assert drafter.continue_slots([1, 2, 99], 0).tokens.shape == (3, 0)  # slots that do not exist


def test_observed_tokens_count_like_prompt_tokens():
    whole = propose([1, 2, 3, 4, 1, 2], 4)
    drafter = NgramDrafter(max_depth=8)
    drafter.begin(0, [1, 2])
    drafter.observe(0, [3])
    drafter.observe(0, [4, 1, 2])
    again = drafter.continue_slots([0], 4)
    for name in ("tokens", "parent_index", "log_q"):
        assert torch.equal(getattr(whole, name), getattr(again, name))


def test_begin_replaces_a_slot():
    drafter = NgramDrafter(max_depth=4)
    drafter.begin(0, [1, 2, 3, 1, 2])
    drafter.begin(0, [1, 2])
    assert drafter.continue_slots([0], 4).tokens.shape == (1, 0)


def test_requests_do_not_see_each_other_by_default():
    drafter = NgramDrafter(max_depth=4)
    drafter.begin(0, [1, 2, 3, 4])
    drafter.end(0)
    drafter.begin(1, [1, 2])
    assert drafter.continue_slots([1], 4).tokens.shape == (1, 0)


def test_shared_tokens_serve_later_requests_up_to_the_end_of_each_history():
    drafter = NgramDrafter(max_depth=4, shared_tokens=100)
    drafter.begin(0, [1, 2, 3, 4])
    drafter.begin(0, [7, 8, 1, 2])  # the first request is over
    assert drafter.continue_slots([0], 4).tokens.tolist() == [[3, 4]]
    assert SEPARATOR not in drafter.continue_slots([0], 4).tokens


def test_what_finished_requests_left_can_be_forgotten():
    drafter = NgramDrafter(max_depth=4, shared_tokens=100)
    drafter.begin(0, [1, 2, 3, 4])
    drafter.begin(0, [7, 8, 1, 2, 5, 6])
    drafter.forget()
    for tokens in ([8, 1, 2], [9, 5, 6]):  # of the shared history, and of the slot itself
        drafter.begin(0, tokens)
        assert drafter.continue_slots([0], 4).tokens.shape == (1, 0)


def test_rounds_forget_the_requests_and_what_they_emitted_last():
    speculator = Speculator(NgramDrafter(max_depth=4), ChainBuilder(4), GreedyRule(), (1, 5))
    speculator.begin(0, [1, 2], [])
    speculator.emitted([0], torch.tensor([[3]]), torch.tensor([1]))
    speculator.forget()
    speculator.begin(1, [1, 2], [4])  # whose drafter hears nothing of slot 0
    assert speculator.output_tokens(1) == [4]
    with pytest.raises(KeyError):
        speculator.output_tokens(0)


@pytest.mark.parametrize("capacity", [2, 3, 4, 7, 40])
def test_shared_history_never_exceeds_its_capacity(capacity):
    shared = SharedHistory(capacity, 2, 16)
    for length in [0, 1, 2, 3, 50, 5, 5, 5]:
        shared.add(list(range(length)))
        assert shared.num_tokens <= capacity


def test_shared_history_drops_the_oldest():
    shared = SharedHistory(40, 2, 16)
    for i in range(50):
        shared.add([1000 + i, 1001 + i, i])
    assert shared.find([1000, 1001], 4) == []
    assert [o.tokens[o.position] for o in shared.find([1049, 1050], 4)] == [49]


@pytest.mark.parametrize(
    "options", [{"max_depth": 0}, {"min_match": 0}, {"max_match": 1}, {"max_occurrences": 0}]
)
def test_bad_limits_are_refused(options):
    with pytest.raises(ValueError, match="need max_depth >= 1, max_occurrences >= 1 and 1 <= min"):
        NgramDrafter(**{"max_depth": 4, **options})


@pytest.mark.parametrize("shared_tokens", [-1, 1])
def test_a_store_that_holds_nothing_is_refused(shared_tokens):
    with pytest.raises(ValueError, match="shared_tokens must be 0 or at least 2, got"):
        NgramDrafter(max_depth=4, shared_tokens=shared_tokens)
