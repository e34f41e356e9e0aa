"""Replay answers through the n-gram drafter: accept length, and whether its log q can be believed.

    python docs/decisions/0003-ngram-calibration.py answers.jsonl [--budget 15] [--depth 8]

Each line of the file: {"set": name, "prompt": [token ids], "answer": [token ids]}. The answer is
taken for the target: a draft is correct if it equals the next token. That is exact for greedy
answers and a fair sample for sampled ones.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from specstack.drafters.ngram import NgramDrafter
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.chain import ChainBuilder
from specstack.types import DraftTree

BINS = [0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0]


@dataclass
class Totals:
    """What the rounds of one set add up to."""

    rounds: int = 0
    emitted: int = 0
    proposed: int = 0
    predicted: float = 0.0
    """Sum of the survival probabilities of all drafts: expected correct drafts."""
    correct: int = 0
    nodes: list[tuple[float, bool]] = field(default_factory=list)
    """Survival and truth of every draft."""


def score_round(tree: DraftTree, answer: list[int], totals: Totals) -> int:
    """Walk the tree along the answer; return the number of correct drafts."""
    is_on_path = {0: True}
    correct = 0
    for node in range(1, int(tree.num_nodes[0])):
        depth = int(tree.depth[0, node])
        above = is_on_path[int(tree.parent_index[0, node])]
        is_right = above and depth <= len(answer) and int(tree.tokens[0, node]) == answer[depth - 1]
        is_on_path[node] = is_right
        correct += is_right
        survival = float(tree.log_q[0, node].exp())
        totals.predicted += survival
        totals.nodes.append((survival, is_right))
    totals.proposed += int(tree.num_nodes[0]) - 1
    return correct


def replay(prompt: list[int], answer: list[int], builder, depth: int, budget: int, totals: Totals):
    """Run one request; its first token comes from the prefill."""
    drafter = NgramDrafter(max_depth=depth)
    drafter.begin(0, [*prompt, answer[0]])
    done = 1
    while done < len(answer):
        proposal = drafter.continue_slots([0], budget)
        tree = builder.build(proposal, torch.tensor([answer[done - 1]]), budget)
        correct = score_round(tree, answer[done:], totals)
        emitted = answer[done : done + correct + 1]
        drafter.observe(0, emitted)
        done += len(emitted)
        totals.rounds += 1
        totals.correct += correct
        totals.emitted += len(emitted)


def main() -> None:
    """Print accept length per set for both builders, then reliability over all sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--depth", type=int, default=8)
    args = parser.parse_args()
    requests = [json.loads(line) for line in args.answers.read_text().splitlines()]
    builders = {"best_first": BestFirstBuilder(args.depth), "chain": ChainBuilder(args.depth)}
    for name, builder in builders.items():
        per_set: dict[str, Totals] = defaultdict(Totals)
        for r in requests:
            if len(r["answer"]) > 1:
                totals = per_set[r["set"]]
                replay(r["prompt"], r["answer"], builder, args.depth, args.budget, totals)
        print(f"{name}: set, accept length (with the bonus), correct drafts predicted / found")
        for key, t in per_set.items():
            print(f"  {key:14} {t.emitted / t.rounds:5.2f}  {t.predicted:7.0f} /{t.correct:6}")
        nodes = [node for t in per_set.values() for node in t.nodes]
        print(f"{name}: survival bin, drafts, mean predicted, share correct")
        for low, high in pairwise(BINS):
            inside = [(q, right) for q, right in nodes if low <= q < high]
            if inside:
                mean, share = (sum(x) / len(inside) for x in zip(*inside, strict=True))
                print(f"  {low:.2f}-{high:.2f} {len(inside):6} {mean:.3f} {share:.3f}")


if __name__ == "__main__":
    main()
