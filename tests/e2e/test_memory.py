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
        "engine.max_total_tokens=1024",
        "engine.context_length=768",
        "engine.args.chunked_prefill_size=64",
        "engine.args.schedule_conservativeness=0.1",
    )
    with serve("quickstart.yaml", TREE, *overrides) as url:
        assert continuations(url, concurrency=8) == plain["continuations"]
        # Again: every prompt is now (partly) in the prefix cache.
        assert continuations(url, concurrency=3) == plain["continuations"]
        metrics = httpx.get(f"{url}/metrics").text
    hits = [line for line in metrics.splitlines() if line.startswith("sglang:cached_tokens_total")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in hits) > 0
    retracted = [x for x in metrics.splitlines() if x.startswith("sglang:num_retracted_requests")]
    assert retracted
