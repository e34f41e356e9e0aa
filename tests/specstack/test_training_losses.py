"""Losses against sums written out in NumPy, chunked sums against whole ones, rates, weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from specstack.training.losses import depth_weights, lk, row_losses
from specstack.training.optimisation import falling, frozen_groups, rate_share
from specstack.training.run_config import Schedule, Stage
from specstack.training.scoring import chunked_sum

TARGET = np.array([[2.0, -1.0, 0.5, 0.0], [0.0, 0.0, 3.0, -2.0]])
DRAFT = np.array([[1.0, 1.0, -0.5, 0.0], [0.5, -1.0, 0.0, 2.0]])
LABELS = np.array([0, 2])


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def reference(kind: str, temperature: float, eta: float) -> np.ndarray:
    p, q = softmax(TARGET / temperature), softmax(DRAFT / temperature)
    kl, tv = (p * np.log(p / q)).sum(-1), 1 - np.minimum(p, q).sum(-1)
    share = np.exp(-eta * np.minimum(p, q).sum(-1))
    return {
        "forward_kl": temperature**2 * kl,
        "reverse_kl": temperature**2 * (q * np.log(q / p)).sum(-1),
        "tv": temperature**2 * tv,
        "lk": temperature**2 * (share * kl + (1 - share) * tv),
        "ce": -np.log(softmax(DRAFT)[np.arange(2), LABELS]),
    }[kind]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "tv", "lk", "ce"])
def test_a_loss_is_what_its_formula_says(kind, temperature: float) -> None:
    found = row_losses(
        kind, torch.tensor(TARGET), torch.tensor(DRAFT), torch.tensor(LABELS),
        temperature=temperature, eta=3.0,
    )  # fmt: skip
    np.testing.assert_allclose(found.numpy(), reference(kind, temperature, 3.0), rtol=1e-5)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "tv", "lk"])
def test_a_loss_is_zero_exactly_where_draft_and_target_agree(kind) -> None:
    logits = torch.tensor(TARGET)
    labels = torch.tensor(LABELS)
    assert row_losses(kind, logits, logits + 3.0, labels).abs().max() < 1e-6
    assert row_losses(kind, logits, torch.tensor(DRAFT), labels).min() > 1e-3


def test_the_gradient_of_forward_kl_is_q_minus_p() -> None:
    draft = torch.tensor(DRAFT, requires_grad=True)
    row_losses("forward_kl", torch.tensor(TARGET), draft, torch.tensor(LABELS)).sum().backward()
    np.testing.assert_allclose(draft.grad, softmax(DRAFT) - softmax(TARGET), atol=1e-6)


def test_lk_leads_with_kl_while_little_is_accepted() -> None:
    apart = torch.tensor([[30.0, 0.0]]).log_softmax(-1)
    other = torch.tensor([[0.0, 30.0]]).log_softmax(-1)
    assert lk(apart, other, eta=3.0).item() == pytest.approx(30.0, rel=1e-3)


def test_depth_weights_fall_with_gamma() -> None:
    assert depth_weights(3, None) == [1.0, 1.0, 1.0]
    assert depth_weights(3, 2.0) == pytest.approx([1.0, np.exp(-0.5), np.exp(-1.0)])


@pytest.mark.parametrize("chunk_rows", [1, 3, 5, 64])
def test_chunks_give_the_gradients_of_the_whole(chunk_rows: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    unused = torch.randn(2, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 5, 2, 3, 1])

    def score(chunk, given):
        return F.cross_entropy(F.linear(given[0], weight), labels[chunk], reduction="sum")

    whole = torch.autograd.grad(score(slice(None), [rows]), [rows, weight])
    total = chunked_sum(score, [rows], [weight, unused], chunk_rows)
    found = torch.autograd.grad(2 * total, [rows, weight, unused])
    assert total.item() == pytest.approx(score(slice(None), [rows]).item())
    torch.testing.assert_close(found[0], 2 * whole[0])
    torch.testing.assert_close(found[1], 2 * whole[1])
    assert not found[2].any()
    with torch.no_grad():
        torch.testing.assert_close(chunked_sum(score, [rows], [weight], chunk_rows), total.double())


def test_no_rows_give_zero_with_a_gradient() -> None:
    rows = torch.randn(0, 4, requires_grad=True)
    weight = torch.randn(4, requires_grad=True)
    total = chunked_sum(lambda chunk, given: given[0].sum(), [rows], [weight], 8)
    total.backward()
    assert (total.item(), weight.grad.abs().sum().item()) == (0.0, 0.0)


def test_the_rate_rises_then_falls_to_its_least_share() -> None:
    shares = [rate_share(step, 100, 0.1, 0.05) for step in range(100)]
    assert shares[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert max(shares) == shares[9] == 1.0
    assert shares[55] == pytest.approx(0.525)
    assert shares[99] == pytest.approx(0.05, abs=1e-3)
    assert shares[10:] == sorted(shares[10:], reverse=True)


def test_what_falls_reaches_zero_at_its_share() -> None:
    assert [falling(step, 10, 0.5) for step in (0, 1, 5, 9)] == pytest.approx([1.0, 0.8, 0.0, 0.0])


def test_stages_freeze_groups_until_they_end() -> None:
    stages = (Stage(until=0.2, freeze=("layers", "input")), Stage(until=0.5, freeze=("kv",)))
    schedule = Schedule(stages=stages)
    frozen = [frozen_groups(schedule, step, 10) for step in (0, 1, 2, 4, 5, 9)]
    assert frozen == [{"layers", "input"}] * 2 + [{"kv"}] * 2 + [set()] * 2
