"""What decision 0009 says: times of tree builders, and how much each accepts.

    python docs/decisions/0009-trees.py times
    python docs/decisions/0009-trees.py accept EVAL [EVAL ..]   # folders of `specstack draft eval`

`accept` prints a table and draws docs/decisions/0009-trees.svg. A folder's name says what its
drafter is; trees and budgets come from its report.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from specstack.drafters.expansion import Children, Frontier, expand
from specstack.drafters.search import make_search
from specstack.trees.beam import BeamBuilder
from specstack.trees.best_first import BestFirstBuilder
from specstack.trees.chain import ChainBuilder
from specstack.trees.expand import ExpandBuilder
from specstack.trees.ranked import RankedBuilder
from specstack.trees.static import StaticBuilder
from specstack.types import DraftProposal
from specstack_kernels.ops import best_prefixes
from specstack_kernels.reference.best_prefixes import best_prefixes as heap
from specstack_kernels.testing_candidates import random_marginals

DEPTH = 5
BATCHES, BUDGETS = (1, 8, 32), (8, 32, 128)
PICTURE = Path(__file__).with_suffix(".svg")


class Marginals:
    """One distribution per depth, as a block head without a corrector has."""

    def __init__(self, tokens: torch.Tensor, log_q: torch.Tensor, width: int) -> None:
        self._tokens, self._log_q = tokens[..., :width], log_q[..., :width]

    def first(self) -> Children:
        return self._of(0, 1)

    def next(self, frontier: Frontier) -> Children:
        return self._of(frontier.depth, frontier.tokens.shape[1])

    def _of(self, depth: int, num_nodes: int) -> Children:
        tokens, log_q = self._tokens[:, depth, None], self._log_q[:, depth, None]
        return Children(tokens.expand(-1, num_nodes, -1), log_q.expand(-1, num_nodes, -1))


def shape(num_drafts: int) -> list[list[int]]:
    """Three children each, level by level, and no deeper than the others."""
    paths: list[list[int]] = [[]]
    for path in paths:
        if len(path) < DEPTH:
            paths += [[*path, rank] for rank in range(3)]
        if len(paths) > num_drafts:
            break
    return paths[1 : num_drafts + 1]


def builders(num_drafts: int) -> dict[str, tuple[RankedBuilder, dict[str, object]]]:
    """Builders with their searches."""
    paths = shape(num_drafts)
    return {
        "chain": (ChainBuilder(DEPTH), {"width": 1}),
        "static": (StaticBuilder(paths), {"paths": paths}),
        "beam": (BeamBuilder(DEPTH, 8), {"width": 8, "frontier": 8}),
        "expand": (ExpandBuilder(DEPTH, 7), {"width": 7, "families": True}),
        "best_first": (BestFirstBuilder(DEPTH), {}),
    }


def median_ms(call: Callable[[], object], repeats: int = 30) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[3:])


def print_times() -> None:
    """Candidates and trees from marginals; one thread."""
    torch.set_num_threads(1)
    names = list(builders(8))
    print("| B | drafts | heap | vectorised | " + " | ".join(f"{n}: tree" for n in names) + " |")
    print("|---" * (4 + len(names)) + "|")
    for batch in BATCHES:
        for budget in BUDGETS:
            given = random_marginals(batch, DEPTH, budget, 0, dead=False)
            cells = [median_ms(lambda g=given, n=budget: heap(*g, n), 5 if batch > 1 else 30),
                     median_ms(lambda g=given, n=budget: best_prefixes(*g, n))]  # fmt: skip
            for builder, options in builders(budget).values():
                proposal = candidates(*given, options, budget)
                cells.append(
                    median_ms(lambda b=builder, p=proposal, n=budget: b.build(p, p.tokens[:, 0], n))
                )
            print(f"| {batch} | {budget} | " + " | ".join(f"{ms:.2f}" for ms in cells) + " |")


def candidates(
    tokens: torch.Tensor, log_q: torch.Tensor, options: dict[str, object], budget: int
) -> DraftProposal:
    """What a head would propose for this tree."""
    if not options:
        found = best_prefixes(tokens, log_q, budget)
        return DraftProposal(found.tokens, found.parent_index, found.log_q)
    search = make_search(**options)  # type: ignore[arg-type]
    width = search.width(budget)
    return expand(Marginals(tokens, log_q, width), search, DEPTH, budget)


def print_accepted(folders: list[Path]) -> None:
    """A table per data set, and the picture."""
    found: dict[str, dict[str, dict[int, tuple[float, float, float]]]] = {}
    for folder in folders:
        report = json.loads((folder / "report.json").read_text())
        for one in report["configurations"]:
            name = f"{folder.name}: {one['tree']['kind']}"
            for data_set, measures in one["data_sets"].items():
                length = measures["accept_length"]
                row = found.setdefault(data_set, {}).setdefault(name, {})
                row[one["draft_budget"]] = (
                    length["value"],
                    length["low"],
                    length["high"],
                )
    for data_set, rows in found.items():
        budgets = sorted({budget for row in rows.values() for budget in row})
        print(f"\n**{data_set}**\n\n| drafter: tree | " + " | ".join(map(str, budgets)) + " |")
        print("|---" * (1 + len(budgets)) + "|")
        for name, row in rows.items():
            cells = [f"{row[b][0]:.2f}" if b in row else "" for b in budgets]
            print(f"| {name} | " + " | ".join(cells) + " |")
    draw(found)


def draw(found: dict[str, dict[str, dict[int, tuple[float, float, float]]]]) -> None:
    """Accept length against the budget."""
    import matplotlib.pyplot as plt

    sets = [name for name in found if name != "all"]
    figure, axes = plt.subplots(1, len(sets), figsize=(3.6 * len(sets), 3.6), sharey=True)
    for axis, data_set in zip(axes, sets, strict=True):
        for name, row in found[data_set].items():
            budgets = sorted(row)
            style = "o" if len(budgets) == 1 else "o-"
            axis.plot(budgets, [row[b][0] for b in budgets], style, ms=3, lw=1, label=name)
        axis.set(title=data_set, xscale="log", xlabel="drafts per round")
        axis.set_xticks([4, 8, 16, 32, 64], labels=["4", "8", "16", "32", "64"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accept length, bonus included")
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["times", "accept"])
    parser.add_argument("folders", nargs="*", type=Path)
    options = parser.parse_args()
    if options.what == "times":
        print_times()
    else:
        print_accepted(options.folders)


if __name__ == "__main__":
    main()
