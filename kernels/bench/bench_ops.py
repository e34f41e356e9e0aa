"""Time of every op at serving shapes: `python kernels/bench/bench_ops.py [--device cuda]`.

Prints the median of 20 calls in milliseconds, as a table for kernels/README.md. On the CPU one
thread is used: the times then do not depend on the number of cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from specstack_kernels import ops
from specstack_kernels.testing import RandomSampling, random_tree

VOCAB, DEPTH = 49_152, 15
SHAPES = [(1, 16), (8, 16), (8, 64)]


def median_ms(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median wall time of a call, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def sampling(batch: int, device: torch.device, *, top_k: int, top_p: float) -> RandomSampling:
    """Return equal settings for all requests."""
    values = (0.7, top_k, top_p, 0.0)
    return RandomSampling(*(torch.full((batch,), value, device=device) for value in values))


def bench(batch: int, nodes: int, device: torch.device) -> dict[str, float]:
    """Time each op. Sampled walks are cut to one depth: how many they visit depends on luck."""
    tokens, parents, num_nodes = (t.to(device) for t in random_tree(batch, nodes, 1000, 0)[:3])
    tree = (tokens, parents, num_nodes)
    logits = 3 * torch.randn((batch, nodes, VOCAB), device=device)
    rows = torch.arange(batch * nodes, device=device).view(batch, nodes)
    predict = logits.max(dim=-1).indices
    uniforms = torch.rand((batch, DEPTH + 1), device=device)
    plain = sampling(batch, device, top_k=1 << 30, top_p=1.0)
    filtered = sampling(batch, device, top_k=50, top_p=0.9)
    probs = ops.filter_probs(logits[:, 0], *plain, use_top_k_top_p=False)
    calls: dict[str, Callable[[], object]] = {
        "argmax of all nodes": lambda: logits.max(dim=-1),
        "accept_greedy": lambda: ops.accept_greedy(*tree, predict, max_depth=DEPTH),
        "filter_probs, temperature": lambda: ops.filter_probs(
            logits[:, 0], *plain, use_top_k_top_p=False
        ),
        "filter_probs, top-k and top-p": lambda: ops.filter_probs(logits[:, 0], *filtered),
        "invert_cdf": lambda: ops.invert_cdf(probs, uniforms[:, 0]),
        "sample_and_walk, one depth": lambda: ops.sample_and_walk(
            *tree, logits.view(-1, VOCAB), rows, *filtered, uniforms[:, :1], max_depth=0
        ),
        "link_tree": lambda: ops.link_tree(parents, num_nodes, max_depth=DEPTH),
    }
    return {name: median_ms(call, device) for name, call in calls.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    columns = [bench(batch, nodes, device) for batch, nodes in SHAPES]
    print("| op | " + " | ".join(f"B{batch} N{nodes}" for batch, nodes in SHAPES) + " |")
    print("|---" * (1 + len(SHAPES)) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]:.2f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
