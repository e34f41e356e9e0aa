"""Correctors against their equations; what they add at the start; what needs no corrector."""

from __future__ import annotations

import pytest
import torch

from specstack.models.heads.block import BlockHead
from specstack.models.heads.testing import random_tables, randomise, tiny_config
from specstack.models.heads.vocabulary import DraftVocabulary

RANK, WIDTH, DRAFTED = 3, 24, 10
FORMS = [("embedding", "hidden"), ("embedding", "logits"), ("table", "hidden"), ("table", "logits")]


def make(kind: str, parent: str = "embedding", output: str = "hidden", **fields) -> BlockHead:
    torch.manual_seed(0)
    conditioning = {"kind": kind, "rank": RANK, "parent": parent, "output": output}
    config = tiny_config(conditioning=conditioning, draft_vocab_size=DRAFTED, **fields)
    vocabulary = DraftVocabulary.from_counts(torch.rand(config.target.vocab_size), DRAFTED)
    return BlockHead(config, random_tables(config), vocabulary)


def read(corrector, head, token):
    """What a parent contributes, [R]."""
    if head.config.conditioning.parent == "table":
        return corrector.parent.table.weight[token]
    x = head.embedding[token]
    x = x / torch.sqrt((x * x).mean() + 1e-6) * corrector.parent.norm.weight
    y = corrector.parent.down.weight @ x
    return y * torch.sigmoid(y)


def gru(cell, x, h):
    r_x, z_x, n_x = (cell.weight_ih @ x + cell.bias_ih).chunk(3)
    r_h, z_h, n_h = (cell.weight_hh @ h + cell.bias_hh).chunk(3)
    r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
    return (1 - z) * torch.tanh(n_x + r * n_h) + z * h


@pytest.mark.parametrize(("parent", "output"), FORMS)
@pytest.mark.parametrize("kind", ["markov", "gru"])
def test_a_path_is_corrected_as_its_equation_says(kind, parent, output) -> None:
    head = make(kind, parent, output)
    randomise(head)
    parents = torch.tensor([[3, 39, 3], [7, 0, 3]])
    hidden = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    found = head.logits(hidden, parents, head.path_states(parents))
    corrector = head.corrector
    for b in range(2):
        state = torch.zeros(RANK, dtype=torch.float64)
        for k in range(3):
            x = read(corrector, head, int(parents[b, k]))
            state = x if kind == "markov" else gru(corrector.cell, x, state)
            added = corrector.up.weight @ state
            if output == "hidden":
                expected = head.lm_head.weight @ (hidden[b, k] + added)
            else:
                expected = head.lm_head.weight @ hidden[b, k] + added
            torch.testing.assert_close(found[b, k], expected)


@pytest.mark.parametrize("kind", ["markov", "gru"])
def test_a_path_can_be_walked_node_by_node(kind: str) -> None:
    head = make(kind)
    randomise(head)
    parents, hidden = torch.tensor([5, 6, 7]), torch.randn(3, WIDTH, dtype=torch.float64)
    whole = head.logits(hidden, parents, head.path_states(parents))
    state = None
    for k in range(3):
        torch.testing.assert_close(head.logits(hidden[k], parents[k], state), whole[k])
        state = head.advance(parents[k], state)
    if kind == "markov":
        torch.testing.assert_close(head.logits(hidden, parents), whole)


@pytest.mark.parametrize(("parent", "output"), FORMS)
@pytest.mark.parametrize("kind", ["markov", "gru"])
def test_a_new_corrector_has_no_effect_and_learns_at_once(kind, parent, output) -> None:
    head = make(kind, parent, output)
    hidden, parents = torch.randn(4, WIDTH, dtype=torch.float64), torch.tensor([1, 2, 3, 4])
    corrected = head.logits(hidden, parents)
    assert torch.equal(corrected, head.logits(hidden))
    corrected.logsumexp(-1).sum().backward()
    assert head.corrector.up.weight.grad.abs().min() > 0


def test_logits_are_the_rows_of_the_draft_vocabulary() -> None:
    head = make("markov")
    hidden = torch.randn(WIDTH, dtype=torch.float64)
    tables = make("markov").lm_head.weight
    assert head.logits(hidden).shape == (DRAFTED,)
    assert torch.equal(head.lm_head.weight, tables)
    ids = head.vocabulary.token_ids
    assert head.vocabulary.to_draft(ids).tolist() == list(range(DRAFTED))


@pytest.mark.parametrize("kind", ["none", "refresh"])
def test_without_a_corrector_parents_do_not_matter(kind: str) -> None:
    config = tiny_config(conditioning={"kind": kind})
    head = BlockHead(config, random_tables(config))
    hidden = torch.randn(2, WIDTH, dtype=torch.float64)
    assert torch.equal(head.logits(hidden, torch.tensor([1, 2])), head.logits(hidden))
    with pytest.raises(ValueError, match=rf"^conditioning.kind {kind} has no state$"):
        head.advance(torch.tensor([1]))


@pytest.mark.parametrize("output", ["hidden", "logits"])
def test_the_table_form_can_be_any_low_rank_table_of_transitions(output: str) -> None:
    """DSpark: base + W1[parent] W2^T."""
    head = make("markov", "table", output)
    randomise(head)
    w1, w2 = head.corrector.parent.table.weight, head.corrector.up.weight
    if output == "hidden":
        w2 = head.lm_head.weight @ w2
    hidden, parents = torch.zeros(40, WIDTH, dtype=torch.float64), torch.arange(40)
    torch.testing.assert_close(head.logits(hidden, parents), w1 @ w2.T)
