"""Access to the modules of `kernels/bench`, which are scripts and no package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "kernels" / "bench"


@pytest.fixture(scope="module")
def bench_folder():
    """Its modules under their own names, which others of the suite may bear."""
    names = {path.stem for path in BENCH.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    threads, path = torch.get_num_threads(), [*sys.path]
    sys.path.insert(0, str(BENCH))
    yield
    sys.path[:] = path
    torch.set_num_threads(threads)
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)
