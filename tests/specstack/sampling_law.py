"""A target on a tiny vocabulary, the law of plain sampling from it, and batches to verify.

The target's logits depend on the whole prefix, so a rule that mixes up nodes is found out.
"""

from __future__ import annotations

from functools import cache

import torch
from scipy.stats import chisquare

from specstack.types import NodeLogits, SamplingTensors
from specstack_kernels.reference.filter_probs import filter_probs as define_probs

NO_FILTER = (1.0, 1 << 30, 1.0, 0.0)
GREEDY = (1.0, 1, 1.0, 0.0)
SETTINGS = {
    "plain": NO_FILTER,
    "temperature": (0.6, 1 << 30, 1.0, 0.0),
    "top_k": (1.0, 2, 1.0, 0.0),
    "top_p": (1.3, 1 << 30, 0.6, 0.0),
    "min_p": (1.0, 1 << 30, 1.0, 0.5),
    "all_filters": (0.8, 3, 0.9, 0.1),
    "greedy": GREEDY,
}


@cache
def plain_probs(prefix, vocab, setting):
    """The target after `prefix`: filtered float64 probabilities, and the raw logits."""
    seed = 1 + sum((token + 1) * 7**i for i, token in enumerate(prefix))
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.2
    columns = [torch.tensor([x]) for x in setting]
    return define_probs(logits[None].double(), *columns)[0], logits


@cache
def plain_law(vocab, length, setting, prefix=()):
    """Joint law [V] * length of plain sampling after `prefix`."""
    probs, _ = plain_probs(prefix, vocab, setting)
    if length <= 1:
        return probs if length else torch.ones(())
    tails = [plain_law(vocab, length - 1, setting, (*prefix, v)) for v in range(vocab)]
    return torch.stack([p * tail for p, tail in zip(probs, tails, strict=True)])


def complete(emitted, accept_lens, volume, vocab, setting):
    """Continue emitted prefixes by plain sampling and sum up."""
    length = emitted.shape[1]
    law = torch.zeros([vocab] * length, dtype=torch.float64)
    keys, index = torch.cat([accept_lens[:, None], emitted], 1).unique(dim=0, return_inverse=True)
    weights = torch.zeros(len(keys), dtype=torch.float64).index_add_(0, index, volume)
    for (num, *tokens), weight in zip(keys.tolist(), weights, strict=True):
        prefix = tuple(tokens[:num])
        law[prefix] += weight * plain_law(vocab, length - num, setting, prefix)
    return law


def repeat(tree, times):
    """The one tree of a DraftTree, for `times` requests."""
    fields = {
        name: value.expand(times, *value.shape[1:])
        for name, value in vars(tree).items()
        if value is not None  # sources
    }
    return type(tree)(**fields)


def shared(values, batch):
    """Logits of one tree's nodes [N, V], read by every request."""
    return NodeLogits(values, torch.arange(len(values)).expand(batch, -1))


def tensors(settings, uniforms):
    """SamplingTensors of rows that cycle through `settings`."""
    columns = [torch.tensor(column) for column in zip(*settings, strict=True)]
    times = uniforms.shape[0] // len(settings)
    return SamplingTensors(
        *(column.repeat(times) for column in columns),
        uniforms=uniforms,
        is_all_greedy=all(top_k == 1 for _, top_k, _, _ in settings),
        use_top_k_top_p=any(1 < top_k < 1 << 30 or top_p < 1 for _, top_k, top_p, _ in settings),
    )


def p_value(tokens, probs):
    """Chi-square of a sample [S] against its law [V]; rare tokens count as one."""
    expected = probs * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probs))
    common = expected >= 5
    folded = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None] + 1e-9])
    return chisquare(folded, wanted * (folded.sum() / wanted.sum())).pvalue
