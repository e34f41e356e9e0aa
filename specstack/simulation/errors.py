"""What users of the simulator get wrong."""

from __future__ import annotations


class SimulationError(ValueError):
    """The input of a simulation is wrong; the text says where, what was found and what to do."""
