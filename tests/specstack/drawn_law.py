"""Trees drawn from a law, every draw of them, and the law that a rule emits over them.

Exact: what a rule emits is averaged over every draw of the tree, weighted by its probability, and
over the uniforms. A rule reads one uniform per depth (block verification one in all) and is
constant between borders, which are computed here from the laws alone; running it once between each
two, weighted by their distance, integrates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from sampling_law import NO_FILTER, complete, plain_law, plain_probs

from specstack.trees.assemble import assemble_tree
from specstack.types import DraftLaw, NodeLogits, SamplingTensors


@dataclass(frozen=True)
class Shape:
    """Which nodes a tree has, whatever is drawn; siblings stand in the order of the draws."""

    vocab: int
    depth: int
    parents: tuple[int, ...]
    """Of nodes 1, 2, ..; 0 is the root."""

    def prefix(self, node, drafts):
        """The tokens from the root to `node`."""
        if node == 0:
            return ()
        return (*self.prefix(self.parents[node - 1], drafts), drafts[node - 1])

    def children(self, node, drafts):
        """Tokens of its children."""
        return tuple(t for t, parent in zip(drafts, self.parents, strict=True) if parent == node)


CHAINS = {
    "one": Shape(4, 1, (0,)),
    "two": Shape(3, 2, (0, 1)),
    "three": Shape(4, 3, (0, 1, 2)),
}
SHAPES = {
    **CHAINS,
    "pair": Shape(3, 2, (0, 0, 1, 2)),
    "wide": Shape(4, 2, (0, 0, 0, 1, 1)),
    "uneven": Shape(4, 3, (0, 0, 1, 1, 3)),
    "all_tokens": Shape(3, 1, (0, 0, 0)),
}


@cache
def draft_law(prefix, vocab):
    """Candidates and q after `prefix`; after every other one a token cannot be drawn."""
    seed = 1000 + sum((token + 1) * 11**i for i, token in enumerate(prefix))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(vocab, generator=generator)
    probs = torch.softmax(1.2 * torch.randn(vocab, generator=generator), dim=0)
    if seed % 2:
        probs[-1] = 0.0
    return tokens, probs / probs.sum()


def draft_probs(prefix, vocab):
    """q of every token, float64."""
    tokens, probs = draft_law(prefix, vocab)
    return torch.zeros(vocab, dtype=torch.float64).scatter(0, tokens, probs.double())


@cache
def draws(shape):
    """Every draw of the tree: its drafts, and their probability.

    Where a law has no token left, the lowest one stands in the shape without having been drawn.
    """
    found = [((), 1.0)]
    for parent in shape.parents:
        longer = []
        for drafts, weight in found:
            partial = replace(shape, parents=shape.parents[: len(drafts)])
            siblings = list(partial.children(parent, drafts))
            q = draft_probs(partial.prefix(parent, drafts), shape.vocab)
            q[siblings] = 0.0
            left = [v for v in range(shape.vocab) if v not in siblings]
            if q.sum() == 0:
                longer.append(((*drafts, left[0]), weight))
                continue
            q /= q.sum()
            longer += [((*drafts, v), weight * float(q[v])) for v in left if q[v] > 0]
        found = longer
    return found


def batch_of(shape, drafts, keep):
    """Trees of these drafts, and the target's logits at their nodes.

    Args:
        keep: drafts -> how many of them are verified.
    """
    num = len(shape.parents)
    tokens = torch.tensor(drafts, dtype=torch.int64).view(-1, num)
    parents = torch.tensor(shape.parents).expand(len(drafts), num)
    num_kept = torch.tensor([keep(each) for each in drafts])
    log_q = torch.zeros(tokens.shape) - torch.arange(num)
    log_q = log_q.masked_fill(torch.arange(num) >= num_kept[:, None], -torch.inf)
    width = {"num_draft_tokens": num + 1, "max_depth": shape.depth}
    tree = assemble_tree(
        tokens, parents, log_q, torch.zeros(len(drafts), dtype=torch.int64), **width
    )
    prefixes = [[shape.prefix(node, each) for node in range(num + 1)] for each in drafts]
    laws = [[draft_law(prefix, shape.vocab) for prefix in row] for row in prefixes]
    law = DraftLaw(
        *(torch.stack([torch.stack([law[i] for law in row]) for row in laws]) for i in (0, 1))
    )
    logits = torch.stack(
        [plain_probs(prefix, shape.vocab, NO_FILTER)[1] for row in prefixes for prefix in row]
    )
    rows = torch.arange(logits.shape[0]).view(len(drafts), num + 1)
    return replace(tree, law=law), NodeLogits(logits, rows)


def select(tree, logits, index):
    """Rows of a batch of trees with their laws."""
    law = DraftLaw(tree.law.tokens[index], tree.law.probs[index])
    fields = {k: v[index] for k, v in vars(tree).items() if isinstance(v, torch.Tensor)}
    return type(tree)(**fields, law=law), NodeLogits(logits.values, logits.rows[index])


Borders = Callable[..., list[float]]
"""(shape, drafts, node, setting) -> lengths of the pieces of [0, 1) on which a rule is constant."""


def emitted_laws(rule, shape, settings, borders: Borders, *, keep=None, num_levels=None):
    """Return for each setting the joint law of depth + 1 tokens under `rule`; rows are mixed.

    Args:
        keep: drafts -> how many of them are verified; None: all.
        num_levels: uniforms that the rule reads; None: one per visited depth.
    """
    drafts = [each for each, _ in draws(shape)]
    tree, logits = batch_of(shape, drafts, keep or len)
    weight = torch.tensor([weight for _, weight in draws(shape)], dtype=torch.float64)
    num, width = len(drafts), shape.depth + 1
    draw = torch.arange(num).repeat(len(settings))
    setting = torch.arange(len(settings)).repeat_interleave(num)
    volume = weight.repeat(len(settings))
    node = torch.zeros_like(draw)
    uniforms = torch.full((len(draw), width), 0.5, dtype=torch.float64)
    laws = [torch.zeros([shape.vocab] * width, dtype=torch.float64) for _ in settings]
    for level in range(width):
        keys = zip(draw.tolist(), node.tolist(), setting.tolist(), strict=True)
        pieces = [[x for x in borders(shape, drafts[d], n, settings[s]) if x] for d, n, s in keys]
        index = torch.tensor([i for i, piece in enumerate(pieces) for _ in piece])
        lengths = torch.tensor([x for piece in pieces for x in piece], dtype=torch.float64)
        starts = [torch.tensor(piece, dtype=torch.float64).cumsum(0) for piece in pieces]
        draw, setting, uniforms = draw[index], setting[index], uniforms[index].clone()
        uniforms[:, level] = (torch.cat(starts) - lengths / 2).clamp(max=1 - 2**-53)
        volume = volume[index] * lengths
        columns = [torch.tensor(column)[setting] for column in zip(*settings, strict=True)]
        sampling = SamplingTensors(
            *columns, uniforms=uniforms, is_all_greedy=all(each[1] == 1 for each in settings)
        )
        result = rule.accept(*select(tree, logits, draw), sampling, max_depth=shape.depth)
        is_done = result.accept_lens <= level + 1
        if level + 1 == (num_levels or width):
            is_done = torch.ones_like(is_done)
        for i, each in enumerate(settings):
            own = is_done & (setting == i)
            done = result.emitted[own], result.accept_lens[own], volume[own]
            laws[i] += complete(*done, shape.vocab, each)
        on = ~is_done
        if not on.any():
            break
        draw, setting, uniforms, volume = draw[on], setting[on], uniforms[on], volume[on]
        node = result.accept_index[on, level + 1]
    return laws


def distance(rule, shape, settings, borders: Borders, **options):
    """Largest difference between the law under `rule` and plain sampling's."""
    laws = emitted_laws(rule, shape, settings, borders, **options)
    plain = [plain_law(shape.vocab, shape.depth + 1, setting) for setting in settings]
    return max(float((a - b).abs().max()) for a, b in zip(laws, plain, strict=True))


def sampling_borders(shape, drafts, node, setting):
    """Of a rule that draws from p."""
    return plain_probs(shape.prefix(node, drafts), shape.vocab, setting)[0].tolist()


def rejection_borders(mistake=None):
    """Of recursive rejection."""

    def borders(shape, drafts, node, setting):
        prefix = shape.prefix(node, drafts)
        return _rejection_lengths(shape, prefix, shape.children(node, drafts), setting, mistake)

    return borders


@cache
def _rejection_lengths(shape, prefix, children, setting, mistake):
    p = plain_probs(prefix, shape.vocab, setting)[0]
    q = draft_probs(prefix, shape.vocab)
    lengths, rest = [], 1.0
    for token in children:
        if q[token] == 0:
            continue
        if mistake != "renormalise":
            q = q / q.sum()
        chance = min(1.0, float(p[token] if mistake == "ratio" else p[token] / q[token]))
        lengths.append(rest * chance)
        rest *= 1 - chance
        left = p if mistake == "subtract" else (p - q).clamp(min=0)
        p = left / left.sum() if left.sum() > 0 else p
        q[token] = 0.0
    return [*lengths, *(rest * p).tolist()]


def block_borders(mistake=None):
    """Of block verification with one uniform: the whole chain first, then ever shorter prefixes."""

    def borders(shape, drafts, node, setting):
        return _block_lengths(shape, drafts, setting, mistake)

    return borders


@cache
def _block_lengths(shape, drafts, setting, mistake):
    prefixes = [drafts[:i] for i in range(len(drafts) + 1)]
    p = [plain_probs(prefix, shape.vocab, setting)[0] for prefix in prefixes]
    q = [draft_probs(prefix, shape.vocab) for prefix in prefixes]
    kept = [1.0]
    for i, draft in enumerate(drafts):
        before = 1.0 if mistake == "product" else kept[i]
        kept.append(min(1.0, before * float(p[i][draft] / q[i][draft])))
    lengths, rest = [], 1.0
    for i in range(len(drafts), -1, -1):
        left = p[i] if i == len(drafts) else (kept[i] * p[i] - q[i]).clamp(min=0)
        mass = float(left.sum())
        chance = kept[i] if i == len(drafts) else mass / (mass + (1 - kept[i])) if i else 1.0
        lengths += (rest * chance * left / max(mass, 1e-300)).tolist()
        rest *= 1 - chance
    return lengths
