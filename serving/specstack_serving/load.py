"""What the engine is doing when a round starts, read on the host without waiting for a device."""

from __future__ import annotations

from typing import Any

from specstack.budget.base import Load

_num_queued = 0


def watch_queue(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the scheduler's start of a batch: workers do not see what waits."""
    global _num_queued
    _num_queued = len(scheduler.waiting_queue)
    return original(scheduler, batch, *args, **kwargs)


def load_of(batch: Any, speculating: list[bool]) -> Load:
    """The load of a decode batch; the same on every tensor-parallel rank."""
    return Load(
        num_running=len(batch.reqs),
        num_queued=_num_queued,
        kv_usage=_kv_usage(batch),
        context_lens=tuple(batch.seq_lens_cpu.tolist()),
        request_ids=tuple(req.rid for req in batch.reqs),
        speculating=tuple(speculating),
    )


def _kv_usage(batch: Any) -> float:
    """Share of the KV cache that running requests hold; what can be evicted counts as free."""
    allocator = batch.token_to_kv_pool_allocator
    free = allocator.available_size() + batch.tree_cache.evictable_size()
    return float(min(max(1.0 - free / allocator.size, 0.0), 1.0))


class PromptTally:
    """Tells tokens of prompts that the prefix cache held from those that were computed."""

    def __init__(self) -> None:
        self._unfinished: tuple[str, int] | None = None
        """The request whose prompt has more parts to come, and its tokens so far. The engine splits
        one prompt at a time."""

    def take(self, batch: Any) -> tuple[int, int]:
        """Cached and computed tokens of a prefill, chunked or not."""
        cached = computed = 0
        before, self._unfinished = self._unfinished, None
        for req, prefix_len in zip(batch.reqs, batch.prefix_lens, strict=True):
            end = len(req.get_fill_ids())
            done = before[1] if before is not None and before[0] == req.rid else 0
            cached += max(0, prefix_len - done)
            computed += end - prefix_len
            if end < len(req.full_untruncated_fill_ids):
                self._unfinished = req.rid, end
        return cached, computed
