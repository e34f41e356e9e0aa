"""The cases of every benchmark of a kernel, and how calls are timed."""

from __future__ import annotations

import inspect
import time
from importlib import import_module
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

BENCH = Path(__file__).parents[2] / "kernels" / "bench"
BENCHES = sorted(path.stem for path in BENCH.glob("bench_*.py"))
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("bench_folder")


@pytest.fixture
def harness():
    return import_module("harness")


@pytest.mark.parametrize("name", BENCHES)
def test_the_cases_for_a_cpu_run(name, harness):
    smallest, names = None, []
    for case in import_module(name).cases(CPU):
        names.append((case.op, case.shape))
        assert case.num_bytes > 0
        assert case.num_flops >= 0
        if smallest is None or case.num_bytes < smallest.num_bytes:
            smallest = case
    assert smallest is not None
    assert len(names) == len(set(names))
    rivals = [rival for rival in smallest.rivals.values() if not isinstance(rival, harness.Lazy)]
    for call in (smallest.run, *rivals):
        call()


@pytest.mark.parametrize("name", [name for name in BENCHES if name != "bench_move_kv"])
def test_the_cases_for_a_gpu_can_be_made(name, harness):
    """Tensors without storage stand for a GPU's; `move_kv` reads one. Rivals are not set up."""
    names = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for case in import_module(name).cases(torch.device("cuda", 0)):
            names.append((case.op, case.shape))
            assert case.num_bytes > 0
            calls = [x.prepare if isinstance(x, harness.Lazy) else x for x in case.rivals.values()]
            for call in (case.run, *calls):
                if isinstance(call.func, FunctionType):
                    inspect.signature(call.func).bind(*call.args, **call.keywords)
    assert names
    assert len(names) == len(set(names))


def test_a_gpu_is_timed_behind_a_cold_cache_and_a_sleep(harness, monkeypatch):
    """In this order, with the device's time of every call and the host's."""
    done = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def elapsed_time(self, end):
            return 0.25

    for name, stand_in in {
        "Event": Event,
        "_sleep": lambda cycles: done.append("sleep"),
        "synchronize": lambda device: done.append("wait"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    scratch = SimpleNamespace(sum=lambda: done.append("read"))
    monkeypatch.setattr(harness, "_scratch", lambda device: scratch)
    timing = harness.measure(lambda: done.append("call"), torch.device("cuda"), repeats=2)
    assert done[:6] == ["call"] * 3 + ["wait", "call", "wait"]
    assert done[6:] == ["read", "sleep", "event", "call", "event", "wait"] * 2
    assert timing.times_ms == (0.25, 0.25)
    assert 0 <= timing.host_ms < 10


def test_slow_calls_are_repeated_less_often(harness, monkeypatch):
    monkeypatch.setattr(harness, "MAX_SECONDS", 0.05)
    calls = []
    timing = harness.measure(lambda: (calls.append(0), time.sleep(0.01)), CPU, repeats=100)
    assert harness.LEAST_REPEATS <= len(timing.times_ms) <= 5
    assert timing.ms >= 10
    assert timing.ms == timing.host_ms
