"""From what was counted to report.json: measures per configuration, data set and context length."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from platform import python_version
from typing import Any

import numpy as np

import specstack
from specstack.evaluation.bound import greedy_bound
from specstack.evaluation.bounds import Bounds
from specstack.evaluation.configurations import Configuration, Grid
from specstack.evaluation.evaluate import Evaluated
from specstack.evaluation.known_texts import KnownText
from specstack.evaluation.measures import Measures, ReliabilityBin, measure, reliability
from specstack.evaluation.rounds import Notes
from specstack.evaluation.tallies import count
from specstack.plan import Plan

FORMAT = 1
ALL = "all"
CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 1 << 30)
"""Buckets of the number of tokens before a root."""
_PACKAGES = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class ConfigurationReport:
    """What one configuration reached."""

    configuration: Configuration
    per_data_set: Mapping[str, Measures]
    """`ALL` last."""
    per_context: Mapping[tuple[int, int], Measures]
    """By [from, to) tokens before the root."""
    bins: Sequence[ReliabilityBin]
    calibration_error: float | None
    bound: float | None

    @property
    def overall(self) -> Measures:
        """Of all data sets."""
        return self.per_data_set[ALL]

    @property
    def efficiency(self) -> float | None:
        """Accept length over its bound."""
        length = self.overall.accept_length.value
        return None if self.bound is None or length is None else length / self.bound

    def as_data(self) -> dict[str, Any]:
        """The form in report.json."""
        budget = self.configuration.budget
        return {
            "name": self.configuration.name,
            "tree": self.configuration.plan.tree.model_dump(mode="json"),
            "draft_budget": budget.draft_budget,
            "min_survival": budget.min_survival,
            "plan_hash": self.configuration.plan.hash,
            "data_sets": {name: m.as_data() for name, m in self.per_data_set.items()},
            "context_len": [
                {"from": low, "to": high, **m.as_data()}
                for (low, high), m in self.per_context.items()
            ],
            "bound": self.bound,
            "tree_efficiency": self.efficiency,
            "calibration": [
                {
                    "q_from": b.low, "q_to": b.high, "drafts": b.num_drafts,
                    "mean_q": b.mean_q, "right": b.right.as_data(),
                }
                for b in self.bins
            ],
            "calibration_error": self.calibration_error,
        }  # fmt: skip


@dataclass(frozen=True)
class Report:
    """A whole evaluation."""

    configurations: tuple[ConfigurationReport, ...]
    chain: ConfigurationReport
    """What alpha_k, MAT and retention are read from."""
    texts: Mapping[str, tuple[int, int]]
    """Per data set: sequences and answer tokens."""
    provenance: Mapping[str, Any]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        grid: Grid,
        evaluated: Evaluated,
        bounds: Bounds | None,
        facts: Mapping[str, Any],
        notes: Sequence[str],
        *,
        num_draws: int,
        seed: int,
    ) -> Report:
        """Measure everything.

        Args:
            bounds: None at temperature 0, where they are known.
        """
        made = {
            configuration.name: _measured(
                configuration, found, evaluated.texts, bounds, num_draws, seed
            )
            for configuration, found in zip(grid.configurations, evaluated.notes, strict=True)
        }
        if bounds is not None and bounds.num_positions:
            notes = [*notes, f"bounds: means over {bounds.num_positions} positions"]
        names = list(dict.fromkeys(text.data_set for text in evaluated.texts))
        sizes = {
            name: _size([text for text in evaluated.texts if text.data_set == name])
            for name in names
        }
        return cls(tuple(made.values()), made[grid.chain.name], sizes, facts, tuple(notes))

    def as_data(self) -> dict[str, Any]:
        """The contents of report.json."""
        return {
            "format": FORMAT,
            "accept_length_counts_the_bonus_token": True,
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
            "data_sets": {
                name: {"sequences": num, "answer_tokens": tokens}
                for name, (num, tokens) in self.texts.items()
            },
            "chain": self.chain.configuration.name,
            "configurations": [c.as_data() for c in self.configurations],
        }


def _size(texts: Sequence[KnownText]) -> tuple[int, int]:
    return len(texts), sum(len(text.output) for text in texts)


def _measured(
    configuration: Configuration,
    notes: Notes,
    texts: Sequence[KnownText],
    bounds: Bounds | None,
    num_draws: int,
    seed: int,
) -> ConfigurationReport:
    rounds, reach = notes.rounds, configuration.reach
    data_sets = np.array([text.data_set for text in texts])
    drafters = configuration.plan.merged_drafters

    def measured(keep: Any) -> Measures:
        counts = count(rounds.where(keep), len(texts), reach)
        return measure(counts, num_draws=num_draws, seed=seed, drafters=drafters)

    everything = np.ones(len(rounds), dtype=bool)
    of_round = data_sets[rounds.sequence]
    names = [name for name in dict.fromkeys(data_sets.tolist()) if (of_round == name).any()]
    per_data_set = {name: measured(of_round == name) for name in names} if len(names) > 1 else {}
    buckets = {}
    for low, high in pairwise(CONTEXT_EDGES):
        inside = (rounds.context_len >= low) & (rounds.context_len < high)
        if inside.any():
            buckets[low, high] = measured(inside)
    bins, error = reliability(notes.reliability, num_draws=num_draws, seed=seed)
    budget = configuration.budget.draft_budget
    bound = greedy_bound(budget, reach) if bounds is None else bounds.values.get((budget, reach))
    return ConfigurationReport(
        configuration, {**per_data_set, ALL: measured(everything)}, buckets, bins, error, bound
    )


def provenance(
    plan: Plan,
    *,
    began: str,
    seconds: float,
    sha256: Mapping[str, str],
    seed: int,
    device: str,
    dtype: str | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What a reader needs to get the same numbers."""
    heads = {
        head.checkpoint: None
        if head.config is None
        else hashlib.sha256(head.config.model_dump_json().encode()).hexdigest()
        for head in plan.heads
    }
    return {
        "command": shlex.join(["specstack", *sys.argv[1:]]),
        "started": began,
        "seconds": round(seconds, 1),
        "versions": {
            "specstack": specstack.__version__,
            "python": python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "target": plan.target.model,
        "drafter": plan.drafter.kind,
        "plan_hash": plan.hash,
        "head_config_sha256": heads,
        "data_sha256": dict(sha256),
        "seed": seed,
        "device": device,
        "target_dtype": dtype,
        **settings,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
