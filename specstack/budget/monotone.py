"""Measured times made to rise along every axis: isotonic regression, one axis after another.

More requests, more drafts or longer contexts never take a machine less time; where medians say so
it is noise, and a budget chosen by it would be chosen by noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MAX_SWEEPS = 100


def isotonic(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rising sequence nearest to `values` [N] in squares.

    Pool adjacent violators: Barlow, Bartholomew, Bremner, Brunk, "Statistical Inference under Order
    Restrictions" (1972): neighbours in the wrong order become their mean.
    """
    means: list[float] = []
    sizes: list[int] = []
    for value in values:
        means.append(float(value))
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            size = sizes[-2] + sizes[-1]
            means[-2:] = [(means[-2] * sizes[-2] + means[-1] * sizes[-1]) / size]
            sizes[-2:] = [size]
    return np.repeat(np.asarray(means), sizes)


def monotone(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `values` [any shape] with the least changes that let it rise along every axis.

    Alternates `isotonic` over the axes until nothing changes; a running maximum, which keeps what
    rises along the other axes, takes what is left of rounding.
    """
    found = np.asarray(values, dtype=np.float64)
    for _ in range(_MAX_SWEEPS):
        before = found
        for axis in range(found.ndim):
            found = np.apply_along_axis(isotonic, axis, found)
        if np.allclose(found, before, rtol=1e-9, atol=0.0):
            break
    for axis in range(found.ndim):
        found = np.maximum.accumulate(found, axis=axis)
    return found
