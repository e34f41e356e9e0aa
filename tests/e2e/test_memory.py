"""Exactness where the engine is short of memory or slices the work: pages, chunks, retraction."""

from __future__ import annotations

from typing import Any

import httpx
from cases import continuations
from harness import Serve

TREE = "budget={kind: fixed, draft_budget: 7}"


def test_pages_chunks_retraction_and_prefix_hits_change_nothing(
    serve: Serve, plain: dict[str, Any]
) -> None:
    """16-token pages, 64-token chunks, and a KV cache that a full batch outgrows."""
    overrides = (
        "engine.page_size=16",
        "engine.max_total_tokens=800",
        "engine.context_length=640",
        "engine.args.chunked_prefill_size=64",
        "engine.args.schedule_conservativeness=0.1",
    )
    with serve("quickstart.yaml", TREE, *overrides) as url:
        assert continuations(url, concurrency=8) == plain["continuations"]
        # Again: every prompt is now (partly) in the prefix cache.
        assert continuations(url, concurrency=3) == plain["continuations"]
        metrics = httpx.get(f"{url}/metrics").text
    assert total(metrics, "sglang:cached_tokens_total") > 0
    assert total(metrics, "sglang:num_retracted_requests_total") > 0


def total(metrics: str, name: str) -> float:
    lines = (line for line in metrics.splitlines() if line.startswith(name + "{"))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
