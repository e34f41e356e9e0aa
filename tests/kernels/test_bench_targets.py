"""Verdicts over times that were made up: met, missed, and not measured."""

from __future__ import annotations

from importlib import import_module

import pytest

pytestmark = pytest.mark.usefixtures("bench_folder")


def results_of_a_fast_gpu(scale=1.0, ratio=1.0):
    """Everything that the targets are about, at a copy of 4 TB/s and 800 TFLOP/s."""
    results, harness = import_module("results"), import_module("harness")
    bounds = results.Bounds(4e12, 800e12)

    def result(op, shape, ms, num_bytes=8, num_flops=0, rivals=()):
        theirs = {name: harness.Timing((ms / ratio,), 0.0) for name in rivals}
        timing = harness.Timing((ms,), 0.02)
        return results.Result(op, shape, num_bytes, num_flops, timing, theirs)

    found = []
    for batch in harness.BATCHES:
        for nodes in harness.NODES:
            tree = f"B{batch} N{nodes}"
            found += [
                result("best_prefixes", f"B{batch} K8 S{nodes}", 0.02 * scale),
                result("best_nodes", f"B{batch} M{8 * nodes} S{nodes - 1}", 0.01),
                result("link_tree", f"{tree} depth 8", 0.01, rivals=["sglang"]),
                result("accept_greedy", f"{tree} K5", 0.01, rivals=["sglang", "torch"]),
                result("move_kv", f"{tree} layers 36, 8 rows", 0.01),
            ]
    for context in harness.CONTEXTS:
        size = 4096 * context
        for nodes in (16, 256):
            found.append(
                result(
                    "draft_attention",
                    f"B1 Q{nodes} L{context}",
                    max(1e3 * size / 4e12, 1e3 * nodes * 16384 * context / 800e12) / 0.8 * scale,
                    size,
                    nodes * 16384 * context,
                    ["flashinfer fa2"],
                )
            )
    return found, bounds


def verdicts(found, bounds, unfinished=()):
    targets = import_module("targets").judge(found, bounds, unfinished=unfinished, is_gpu=True)
    return [target.verdict for target in targets], targets


def test_targets_that_are_met():
    found, targets = verdicts(*results_of_a_fast_gpu())
    assert found == ["met"] * 4
    # 0.02 + 3 * 0.01 of 8.19e9 * 2 / 4e12 = 4.095 ms
    assert targets[0].number == "at most 1.22%"
    assert "lower bound, 4.09 ms" in targets[0].claim
    assert targets[2].number == "at least 80.0%"
    assert sum("arithmetic bounds it" in line for line in targets[2].details) == 2
    assert targets[3].number == "at most 1.00 x, 24 of 24 pairs measured"


def test_targets_that_are_missed():
    """Control: twice the time misses the first three, a faster rival the last."""
    found, targets = verdicts(*results_of_a_fast_gpu(scale=5.0, ratio=1.06))
    assert found == ["missed"] * 4
    assert "N16 with best_prefixes: 0.1300 ms, 3.17%; host 0.080 ms" in targets[0].details
    assert "accept_greedy B16 N64 K5: 1.06 x sglang" in targets[3].details


def test_targets_of_which_something_is_missing():
    found, bounds = results_of_a_fast_gpu()
    unfinished = [case for case in found if case.op != "move_kv"]
    assert verdicts(unfinished, bounds, ["move_kv"])[0] == [
        "not measured", "not measured", "met", "not measured",
    ]  # fmt: skip
    assert verdicts(found, bounds, ["draft_attention"])[0][2] == "not measured"
    results = import_module("results")
    case = results.Result("link_tree", "B3 N9", 8, 0, found[0].timing, {"flashinfer": "no module"})
    judged, targets = verdicts([*found, case], bounds)
    assert judged[3] == "not measured"
    assert targets[3].details == ("link_tree: no time of flashinfer: no module",)
    slow, _ = results_of_a_fast_gpu(scale=5.0)
    assert verdicts(slow[:5], bounds, ["draft_attention"])[0][:2] == ["missed", "not measured"]
