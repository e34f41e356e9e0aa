"""The adapters to FlashInfer's sampling, through its Python, over stand-ins of its kernels.

The stand-ins keep by value, as the kernels do (`test_contract` pins their lines). On distinct
probabilities they equal the torch references that FlashInfer ships.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from specstack_kernels.flashinfer import sampling as adapters
from specstack_kernels.reference.filter_probs import filter_probs as reference
from specstack_kernels.testing import random_sampling

pytest.importorskip("flashinfer")

from flashinfer import sampling
from flashinfer.trace.templates.sampling import (
    top_k_renorm_probs_trace,
    top_p_renorm_probs_trace,
)


def _renormalised(probs, is_kept):
    kept = probs * is_kept
    return kept / kept.sum(dim=-1, keepdim=True)


def _above(probs):
    """How many probabilities are larger than each, and their sum."""
    is_larger = probs[:, None, :] > probs[:, :, None]
    return is_larger.sum(-1), (is_larger * probs[:, None, :].double()).sum(-1)


class HostSampling:
    """Stands for FlashInfer's compiled sampling module."""

    def __init__(self) -> None:
        self.draws: list[dict] = []

    def top_k_renorm_probs(self, probs, top_k, _scalar, _rows, is_deterministic):
        assert is_deterministic
        count, _ = _above(probs)
        return _renormalised(probs, count < top_k[:, None])

    def top_p_renorm_probs(self, probs, top_p, _scalar, is_deterministic, _workspace):
        assert is_deterministic
        _, mass = _above(probs)
        # As if rounding reached the whole sum one token early.
        limit = torch.where(top_p < 1, top_p, 1 - probs.amin(dim=-1))
        return _renormalised(probs, mass < limit[:, None])

    def sampling_from_probs(self, probs, indices, deterministic, generator, seed, offset, valid):
        self.draws.append({"seed": seed, "offset": offset})
        return probs.argmax(-1).int()

    def min_p_sampling_from_probs(
        self, probs, indices, min_p, _scalar, deterministic, generator, seed, offset, valid
    ):
        self.draws.append({"min_p": min_p, "seed": seed, "offset": offset})
        return probs.argmax(-1).int()

    def top_k_top_p_sampling_from_probs(
        self, probs, indices, top_k, _k, top_p, _p, deterministic, generator, seed, offset, valid
    ):
        self.draws.append({"top_k": top_k, "top_p": top_p, "seed": seed, "offset": offset})
        return probs.argmax(-1).int()


@pytest.fixture(autouse=True)
def host(monkeypatch) -> HostSampling:
    stand_in = HostSampling()
    signature = inspect.signature(sampling.softmax)

    def softmax(*args, **kwargs):
        call = SimpleNamespace(**signature.bind(*args, **kwargs).arguments)
        return torch.softmax(call.logits.float() / call.temperature[:, None], dim=-1)

    monkeypatch.setattr(sampling, "softmax", softmax)  # insists on CUDA
    monkeypatch.setattr(sampling, "get_sampling_module", lambda: stand_in)
    return stand_in


def distinct_probs(batch, vocab, seed=0):
    random = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(batch, vocab, generator=random), dim=-1)
    assert all(len(row.unique()) == vocab for row in probs)
    return probs


def test_the_stand_ins_equal_what_flashinfer_ships():
    probs = distinct_probs(4, 33)
    top_k, top_p = torch.tensor([1, 5, 32, 33]), torch.tensor([0.1, 0.5, 0.9, 0.99])
    ours = adapters.top_k_renorm_probs(probs, top_k)
    # Its reference takes the largest top_k of a batch for all rows.
    pairs = zip(probs, top_k.tolist(), strict=True)
    rows = [top_k_renorm_probs_trace.reference(row[None], k) for row, k in pairs]
    torch.testing.assert_close(ours, torch.cat(rows), rtol=1e-5, atol=0)
    ours = adapters.top_p_renorm_probs(probs, top_p)
    torch.testing.assert_close(
        ours, top_p_renorm_probs_trace.reference(probs, top_p), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("use_top_k_top_p", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_distinct_probabilities_are_filtered_as_in_the_definition(seed, use_top_k_top_p):
    logits = torch.randn(6, 33, generator=torch.Generator().manual_seed(seed))
    settings = random_sampling(6, 33, seed)
    actual = adapters.filter_probs(logits, *settings, use_top_k_top_p=use_top_k_top_p)
    expected = reference(logits, *settings, use_top_k_top_p=use_top_k_top_p)
    assert torch.equal(actual > 0, expected > 0)
    # Two sums over 33 float32 numbers.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


def both(probs, *, top_k=100, top_p=1.0):
    """What each keeps of one row."""
    settings = (torch.tensor([1.0]), torch.tensor([top_k]), torch.tensor([top_p]), torch.zeros(1))
    logits = torch.tensor([probs]).log()
    return [f(logits, *settings)[0].gt(0).tolist() for f in (adapters.filter_probs, reference)]


def test_ties_at_a_cut_all_stay():
    ours, defined = both([0.4, 0.2, 0.2, 0.2], top_k=2)
    assert ours == [True, True, True, True]
    assert defined == [True, True, False, False]


def test_a_mass_that_equals_top_p_ends_it():
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    kept = adapters.top_p_renorm_probs(probs, torch.tensor([0.5]))
    assert kept.gt(0).tolist() == [[True, False, False, False]]
    _, defined = both([0.5, 0.25, 0.125, 0.125], top_p=0.5)
    assert defined == [True, True, False, False]


def test_top_p_of_one_cuts_nothing():
    ours, defined = both([0.5, 0.25, 0.15, 0.1])
    assert ours == defined == [True] * 4
    probs = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
    bare = sampling.top_p_renorm_probs(probs, torch.ones(1), is_deterministic=True)
    assert bare[0, 3] == 0, "the stand-in drops a tail here"


def test_chained_cuts_are_not_the_joint_ones():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    top_k, top_p = torch.tensor([2]), torch.tensor([0.5])
    chained = adapters.top_p_renorm_probs(adapters.top_k_renorm_probs(probs, top_k), top_p)
    assert chained.gt(0).tolist() == [[True, False, False, False]]
    ours, defined = both([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.5)
    assert ours == defined == [True, True, False, False]


def test_samplers_pass_seeds_as_tensors_and_cut_jointly(host):
    probs, seed, offset = distinct_probs(2, 9), torch.tensor([3, 4]), torch.tensor([0, 8])
    top_k, part = torch.tensor([2, 3]), torch.tensor([0.5, 0.9])
    tokens = [
        adapters.sample_from_probs(probs, seed, offset),
        adapters.sample_min_p(probs, part, seed, offset),
        adapters.sample_top_k_top_p(probs, top_k, part, seed, offset),
    ]
    assert all(torch.equal(drawn, probs.argmax(-1)) for drawn in tokens)  # int64
    assert [sorted(draw) for draw in host.draws] == [
        ["offset", "seed"], ["min_p", "offset", "seed"], ["offset", "seed", "top_k", "top_p"],
    ]  # fmt: skip
    assert all(draw["seed"] is seed and draw["offset"] is offset for draw in host.draws)
    assert host.draws[2]["top_k"] is top_k
