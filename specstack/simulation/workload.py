"""What is asked of the simulated server: N requests, and when each may start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are admitted.

    An open loop gives `arrivals`. A closed loop gives `concurrency`: a request comes as soon as
    fewer than so many are in flight, and the run ends when no request is left to keep that up.
    """

    name: str
    prompt_lens: Ints
    """Tokens [N], at least 1."""
    output_lens: Ints
    """Tokens to emit [N], at least 1; the first by the prompt's own forward."""
    arrivals: Floats | None = None
    """Seconds since the start [N], rising."""
    concurrency: Ints | None = None
    """[N]."""

    def __post_init__(self) -> None:
        assert (self.arrivals is None) != (self.concurrency is None)

    def __len__(self) -> int:
        return len(self.prompt_lens)
