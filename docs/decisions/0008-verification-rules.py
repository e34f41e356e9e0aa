"""Drafts accepted per round by each verification rule, over the same targets and drafters.

    python docs/decisions/0008-verification-rules.py [--rounds 20000]

A round verifies 8 drafts. Target logits are s g_v, with standard normal g over V tokens and s
uniform between 2 and 14, anew at every depth: some tokens are all but certain, others wide open.
The drafter's logits add normal noise; both are divided by the temperature. All rules see the same
rounds, and run as they are served.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specstack.trees.assemble import assemble_tree
from specstack.types import DraftLaw, DraftTree, NodeLogits, SamplingTensors
from specstack.verify.base import VerifyRule
from specstack.verify.block import BlockRule
from specstack.verify.rejection import RejectionRule
from specstack.verify.sample_and_walk import SampleAndWalkRule

DRAFTS = 8
CHAIN = tuple(range(DRAFTS))
TWIGS = (0, 0, 1, 1, 3, 3, 5, 5)
"""Parents of nodes 1, 2, ..: two children for every first child, four deep."""
BUSH = (0, 0, 0, 0, 1, 1, 2, 2)
"""Four children of the root, two of its first two."""
VOCABS, NOISES, TEMPERATURES = (32, 1000), (1.0, 2.0, 4.0), (0.3, 0.7, 1.0)
CHUNK = 1000


@dataclass(frozen=True)
class Rounds:
    """Some rounds. The nodes of a depth share their laws: a walk visits one of them."""

    target: Tensor
    """Logits at depths 0 to 8, [R, 9, V]."""
    draft: Tensor
    """Log q at depths 0 to 8, [R, 9, V]."""
    gumbel: Tensor
    """Noise for the draws, at each node and token, [R, 9, V]."""
    uniforms: Tensor
    """[R, 9]."""


def make_rounds(vocab: int, noise: float, temperature: float, seed: int) -> Rounds:
    """Return CHUNK random rounds."""
    generator = torch.Generator().manual_seed(seed)
    shape = (CHUNK, DRAFTS + 1, vocab)
    scale = 2 + 12 * torch.rand((CHUNK, DRAFTS + 1, 1), generator=generator)
    target = scale * torch.randn(shape, generator=generator)
    draft = target + noise * torch.randn(shape, generator=generator)
    return Rounds(
        target / temperature,
        (draft / temperature).log_softmax(dim=-1),
        -torch.log(-torch.log(torch.rand(shape, generator=generator))),
        torch.rand((CHUNK, DRAFTS + 1), generator=generator, dtype=torch.float64),
    )


def make_trees(tokens: Tensor, parents: Tensor, law: DraftLaw | None = None) -> DraftTree:
    """Link drafts [R, 8]."""
    bonus, log_q = torch.zeros(len(tokens), dtype=torch.int64), torch.zeros(tokens.shape)
    limits = {"num_draft_tokens": DRAFTS + 1, "max_depth": DRAFTS}
    return replace(assemble_tree(tokens, parents, log_q, bonus, **limits), law=law)


def drawn(shape: tuple[int, ...], rounds: Rounds) -> DraftTree:
    """Children drawn without replacement."""
    return _filled(shape, rounds, rounds.gumbel)


def best(shape: tuple[int, ...], rounds: Rounds) -> DraftTree:
    """The most probable children."""
    return replace(_filled(shape, rounds, torch.zeros_like(rounds.gumbel)), law=None)


def _filled(shape: tuple[int, ...], rounds: Rounds, noise: Tensor) -> DraftTree:
    depth = [0]
    for parent in shape:
        depth.append(depth[parent] + 1)
    log_q = rounds.draft[:, depth]  # [R, 9, V], of the children of each node
    tokens = torch.zeros((CHUNK, DRAFTS), dtype=torch.int64)
    for parent in sorted(set(shape)):
        children = [i for i, above in enumerate(shape) if above == parent]
        scores = log_q[:, parent] + noise[:, parent]
        tokens[:, children] = scores.topk(len(children), dim=1).indices
    candidates = torch.arange(log_q.shape[2]).expand(log_q.shape)
    law = DraftLaw(candidates, log_q.exp())
    return make_trees(tokens, torch.tensor(shape).expand_as(tokens), law)


def best_first(rounds: Rounds) -> DraftTree:
    """The 8 most probable paths, whatever shape that gives."""
    top = rounds.draft[:, :DRAFTS].topk(DRAFTS, dim=2)
    paths = [_best_paths(scores) for scores in top.values.tolist()]
    parents = torch.tensor([[parent for parent, _, _ in path] for path in paths])
    depth = torch.tensor([[depth for _, depth, _ in path] for path in paths])
    rank = torch.tensor([[rank for _, _, rank in path] for path in paths])
    row = torch.arange(CHUNK)[:, None]
    return make_trees(top.indices[row, depth, rank], parents)


def _best_paths(scores: list[list[float]]) -> list[tuple[int, int, int]]:
    """(parent node, depth of the parent, rank among its children) of each draft."""
    waiting = [(-scores[0][0], 0, 0, 0, 0.0)]
    chosen: list[tuple[int, int, int]] = []
    while len(chosen) < DRAFTS:
        negated, parent, depth, rank, above = heapq.heappop(waiting)
        chosen.append((parent, depth, rank))
        if rank + 1 < DRAFTS:
            sibling = (-above - scores[depth][rank + 1], parent, depth, rank + 1, above)
            heapq.heappush(waiting, sibling)
        if depth + 1 < DRAFTS:
            child = (negated - scores[depth + 1][0], len(chosen), depth + 1, 0, -negated)
            heapq.heappush(waiting, child)
    return chosen


def correct_drafts(rule: VerifyRule, tree: DraftTree, rounds: Rounds) -> Tensor:
    """Accepted drafts of each round, the bonus token excluded, [R]."""
    each = torch.ones(CHUNK)
    rows = torch.arange(CHUNK)[:, None] * (DRAFTS + 1) + tree.depth.clamp(max=DRAFTS)
    sampling = SamplingTensors(
        temperature=each,
        top_k=torch.full((CHUNK,), 1 << 30),
        top_p=each,
        min_p=0 * each,
        uniforms=rounds.uniforms,
        is_all_greedy=False,
        use_top_k_top_p=False,
    )
    logits = NodeLogits(rounds.target.flatten(0, 1), rows)
    return rule.accept(tree, logits, sampling, max_depth=DRAFTS).num_correct_drafts.double()


CASES: dict[str, tuple[VerifyRule, Callable[[Rounds], DraftTree]]] = {
    "walk, chain": (SampleAndWalkRule(), lambda rounds: best(CHAIN, rounds)),
    "walk, twigs": (SampleAndWalkRule(), lambda rounds: best(TWIGS, rounds)),
    "walk, bush": (SampleAndWalkRule(), lambda rounds: best(BUSH, rounds)),
    "walk, best first": (SampleAndWalkRule(), best_first),
    "walk, drawn chain": (SampleAndWalkRule(), lambda rounds: drawn(CHAIN, rounds)),
    "rejection, chain": (RejectionRule(), lambda rounds: drawn(CHAIN, rounds)),
    "rejection, twigs": (RejectionRule(), lambda rounds: drawn(TWIGS, rounds)),
    "rejection, bush": (RejectionRule(), lambda rounds: drawn(BUSH, rounds)),
    "block, chain": (BlockRule(), lambda rounds: drawn(CHAIN, rounds)),
}


def main() -> None:
    """Print the table of the decision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    num_chunks = parser.parse_args().rounds // CHUNK
    torch.set_num_threads(1)
    heads = ["V", "noise", "T", "max p", "TV", *CASES]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    largest_error = 0.0
    for vocab, noise, temperature in itertools.product(VOCABS, NOISES, TEMPERATURES):
        found: dict[str, list[Tensor]] = {name: [] for name in CASES}
        sharpness, gaps = [], []
        for seed in range(num_chunks):
            rounds = make_rounds(vocab, noise, temperature, seed)
            p, q = rounds.target.softmax(dim=-1), rounds.draft.exp()
            sharpness.append(p.amax(dim=-1).mean())
            gaps.append((p - q).abs().sum(dim=-1).mean() / 2)
            for name, (rule, trees) in CASES.items():
                found[name].append(correct_drafts(rule, trees(rounds), rounds))
        means = {name: torch.cat(parts) for name, parts in found.items()}
        error = max(float(all_.std() / len(all_) ** 0.5) for all_ in means.values())
        largest_error = max(largest_error, error)
        facts = [f"{float(torch.stack(values).mean()):.2f}" for values in (sharpness, gaps)]
        cells = [f"{float(all_.mean()):.2f}" for all_ in means.values()]
        row = [str(vocab), f"{noise:g}", f"{temperature:g}", *facts, *cells]
        print(f"| {' | '.join(row)} |", flush=True)
    print(f"\nLargest standard error: {largest_error:.3f}")


if __name__ == "__main__":
    main()
