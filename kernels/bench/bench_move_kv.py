"""Times of `move_kv` over all layers beside the move of SGLang's pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from harness import QWEN3_8B, BenchCase, Lazy, Rival, sizes
from torch import Tensor

from specstack_kernels import ops
from specstack_kernels.testing_paths import RandomPaths, random_paths
from specstack_kernels.torch_ops.move_kv import move_kv as torch_form

WIDTH = 9
CPU_LAYERS = 4


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Keys and values of Qwen3-8B's layers; paths of 1 to WIDTH random nodes."""
    batches, nodes, _ = sizes(device)
    for batch, num_nodes in product(batches, nodes):
        yield _case(random_paths(batch, num_nodes, WIDTH, 0), device)


def _case(paths: RandomPaths, device: torch.device) -> BenchCase:
    window, accept_index = paths.window.to(device), paths.accept_index.to(device)
    is_move = paths.accept_index > torch.arange(WIDTH)
    layers = QWEN3_8B["layers"] if device.type == "cuda" else CPU_LAYERS
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (paths.num_slots, QWEN3_8B["kv_heads"], QWEN3_8B["head_dim"])
    pools = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2 * layers)]
    rivals: dict[str, Rival] = {"torch": partial(torch_form, pools, window, accept_index)}
    if device.type == "cuda":
        rivals["sglang"] = Lazy(partial(_sglang, paths.num_slots, layers, window, accept_index))
    rows = int(is_move.sum())
    return BenchCase(
        op="move_kv",
        shape=f"B{window.shape[0]} N{window.shape[1]} layers {layers}, {rows} rows",
        run=partial(ops.move_kv, pools, window, accept_index),
        num_bytes=2 * rows * sum(pool[0].nbytes for pool in pools),
        rivals=rivals,
    )


def _sglang(
    num_slots: int, layers: int, window: Tensor, accept_index: Tensor
) -> Callable[[], object]:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=num_slots,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=QWEN3_8B["kv_heads"],
        head_dim=QWEN3_8B["head_dim"],
        layer_num=layers,
        device="cuda",
        enable_memory_saver=False,
        enable_kv_cache_copy=True,
    )
    return partial(_sglang_move, pool, window, accept_index)


def _sglang_move(pool: Any, window: Tensor, accept_index: Tensor) -> None:
    """With the slots as our worker finds them: padding moves onto itself."""
    target = window[:, : accept_index.shape[1]]
    source = window.gather(1, accept_index.clamp(min=0))
    source = torch.where(accept_index >= 0, source, target)
    pool.move_kv_cache(target.reshape(-1), source.reshape(-1))
