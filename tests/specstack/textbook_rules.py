"""Rules that divide p by q as textbooks write them, right but for one mistake each."""

from __future__ import annotations

import torch

from specstack.types import AcceptResult
from specstack_kernels.torch_ops.filter_probs import filter_probs
from specstack_kernels.torch_ops.sample_and_walk import invert_cdf
from specstack_kernels.torch_ops.walk import walk_tree


def _laws_at(tree, logits, sampling, node):
    """p and q of every token [B, V], float64, at a node of each request."""
    rows = torch.arange(node.shape[0])
    settings = sampling.filters
    p = filter_probs(logits.values[logits.rows[rows, node]], *settings).double()
    q = tree.law.probs[rows, node].double()
    return p, torch.zeros_like(p).scatter(1, tree.law.tokens[rows, node], q)


def _norm(weights):
    return weights / weights.sum(dim=1, keepdim=True)


class TextbookRejection:
    """Recursive rejection over the whole vocabulary, right but for one mistake.

    ratio: takes a draft with p instead of p / q. subtract: p stays p after a refusal.
    renormalise: q is not divided by its sum after it lost a draft.
    """

    def __init__(self, mistake=None):
        self.mistake = mistake

    def accept(self, tree, logits, sampling, *, max_depth):
        def choose(step, node):
            return self._choose(tree, *_laws_at(tree, logits, sampling, node), sampling, step, node)

        parts = tree.tokens, tree.parent_index, tree.num_nodes
        return AcceptResult(*walk_tree(*parts, choose, max_depth=max_depth))

    def _choose(self, tree, p, q, sampling, step, node):
        u = sampling.uniforms[:, step]
        taken = torch.full_like(node, -1)
        for child in range(1, tree.num_draft_tokens):
            token = tree.tokens[:, child : child + 1]
            is_offered = (tree.parent_index[:, child] == node) & (child < tree.num_nodes)
            is_offered &= (taken < 0) & (q.gather(1, token)[:, 0] > 0)
            law = q if self.mistake == "renormalise" else _norm(q)
            chance = p.gather(1, token)[:, 0]
            if self.mistake != "ratio":
                chance = chance / law.gather(1, token)[:, 0]
            is_taken = is_offered & (u < chance)
            taken = torch.where(is_taken, token[:, 0], taken)
            is_refused = is_offered & ~is_taken
            u = torch.where(is_refused, (u - chance) / (1 - chance), u)
            left = (p - law).clamp(min=0)
            if self.mistake != "subtract":
                p = torch.where((is_refused & (left.sum(dim=1) > 0))[:, None], _norm(left), p)
            q = torch.where(is_refused[:, None], q.scatter(1, token, 0.0), q)
        greedy = p.max(dim=1).indices
        drawn = torch.where(taken >= 0, taken, invert_cdf(p, u))
        return torch.where(sampling.top_k == 1, greedy, drawn)


class TextbookBlock:
    """Block verification over the whole vocabulary, right but for one mistake.

    product: a prefix is kept for its last draft alone.
    """

    def __init__(self, mistake=None):
        self.mistake = mistake

    def accept(self, tree, logits, sampling, *, max_depth):
        num = tree.num_draft_tokens - 1
        u = sampling.uniforms[:, 0]
        request = torch.arange(len(u))
        kept, left, chances = [torch.ones_like(u)], [], []
        for i in range(num + 1):
            p, q = _laws_at(tree, logits, sampling, torch.full_like(request, i))
            left.append(p if i == num else (kept[i][:, None] * p - q).clamp(min=0))
            mass = left[i].sum(dim=1)
            chances.append(kept[i] if i == num else mass / (mass + (1 - kept[i])))
            if i < num:
                token = tree.tokens[:, i + 1 : i + 2]
                before = torch.ones_like(u) if self.mistake == "product" else kept[i]
                ratio = (p.gather(1, token) / q.gather(1, token))[:, 0]
                kept.append((before * ratio).clamp(max=1))
        length = torch.zeros_like(request)
        for i in range(num, 0, -1):
            passes = (length == 0) & (u < chances[i])
            failed = (length == 0) & ~passes
            u = torch.where(passes, u / chances[i], u)
            u = torch.where(failed, (u - chances[i]) / (1 - chances[i]), u)
            length = torch.where(passes, i, length)
        token = invert_cdf(torch.stack(left, dim=1)[request, length], u.clamp(max=1 - 2**-53))
        step = torch.arange(num + 1)
        emitted = tree.tokens.roll(-1, dims=1) * (step < length[:, None])
        emitted = torch.where(step == length[:, None], token[:, None], emitted)
        return AcceptResult(torch.where(step <= length[:, None], step, -1), length + 1, emitted)
