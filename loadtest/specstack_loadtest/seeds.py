"""Where every drawn value of a load test comes from: the scenario's seed, a purpose, a place.

A purpose has its own stream, so that what is drawn for one does not move when another is added.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What is drawn. Values are part of what a seed means: add, never renumber."""

    ARRIVALS = 1
    PROMPT_ORDER = 2
    FURTHER_TURNS = 3
    TEMPERATURE = 4
    PREFIX_GROUP = 5
    PROMPT_LENGTH = 6
    OUTPUT_LENGTH = 7
    PADDING = 8
    PREFIX = 9
    PREFIX_BLOCK = 10


def random_of(seed: int, purpose: Purpose, *place: int) -> np.random.Generator:
    """The generator for one purpose at one place, for example (phase, index)."""
    return np.random.default_rng([seed, purpose, *place])


def request_seed(seed: int, phase: int, index: int, turn: int) -> int:
    """The sampling seed of a request: 31 bits, as every server takes them."""
    digest = hashlib.sha256(f"{seed}/{phase}/{index}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
