"""The ops that callers use. Each has its definition in `reference` under the same name.

Where the tensors are decides what runs: `choices` says what. Kernels are imported when they are
first needed, so that a CPU needs none of what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from specstack_kernels.choices import GPU_KERNELS
from specstack_kernels.reference.pack_bits import count_mask_bytes
from specstack_kernels.torch_ops.accept_block import accept_block as _accept_block
from specstack_kernels.torch_ops.accept_greedy import accept_greedy as _accept_greedy
from specstack_kernels.torch_ops.accept_rejection import accept_rejection as _accept_rejection
from specstack_kernels.torch_ops.accept_typical import accept_typical
from specstack_kernels.torch_ops.best_nodes import accumulate_log_q
from specstack_kernels.torch_ops.best_nodes import best_nodes as _best_nodes
from specstack_kernels.torch_ops.best_prefixes import best_prefixes as _best_prefixes
from specstack_kernels.torch_ops.context_kv import context_kv as _context_kv
from specstack_kernels.torch_ops.draft_attention import draft_attention as _draft_attention
from specstack_kernels.torch_ops.filter_probs import filter_probs as _filter_probs
from specstack_kernels.torch_ops.link_tree import link_tree as _link_tree
from specstack_kernels.torch_ops.mix_kv import mix_kv as _mix_kv
from specstack_kernels.torch_ops.move_kv import move_kv as _move_kv
from specstack_kernels.torch_ops.move_kv import path_slots
from specstack_kernels.torch_ops.pack_bits import pack_bits as _pack_bits
from specstack_kernels.torch_ops.pack_tree_mask import pack_tree_mask as _pack_tree_mask
from specstack_kernels.torch_ops.sample_and_walk import invert_cdf
from specstack_kernels.torch_ops.sample_and_walk import sample_and_walk as _sample_and_walk
from specstack_kernels.torch_ops.score_frontier import score_frontier as _score_frontier
from specstack_kernels.torch_ops.sum_kv import sum_kv as _sum_kv
from specstack_kernels.torch_ops.top_tokens import top_tokens as _top_tokens

__all__ = [
    "accept_block", "accept_greedy", "accept_rejection", "accept_typical", "accumulate_log_q",
    "best_nodes", "best_prefixes", "context_kv", "count_mask_bytes", "draft_attention",
    "filter_probs", "invert_cdf", "link_tree", "mix_kv", "move_kv", "pack_bits", "pack_tree_mask",
    "path_slots",
    "sample_and_walk", "score_frontier", "sum_kv", "top_tokens",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")


@cache
def _kernel(name: str) -> Callable[..., Any]:
    return getattr(import_module(f"specstack_kernels.triton.{name}"), name)  # type: ignore[no-any-return]


def _by_device(torch_form: Callable[P, R]) -> Callable[P, R]:
    """Run the Triton kernel of the same name where the first tensor is on a GPU."""
    name = torch_form.__name__
    assert name in GPU_KERNELS, name

    @wraps(torch_form)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        tensor: Tensor = first if isinstance(first, Tensor) else first[0]
        if tensor.is_cuda:
            result: R = _kernel(name)(*args, **kwargs)
            return result
        return torch_form(*args, **kwargs)

    return op


accept_block = _by_device(_accept_block)
accept_greedy = _by_device(_accept_greedy)
accept_rejection = _by_device(_accept_rejection)
best_nodes = _by_device(_best_nodes)
best_prefixes = _by_device(_best_prefixes)
context_kv = _by_device(_context_kv)
draft_attention = _by_device(_draft_attention)
filter_probs = _by_device(_filter_probs)
link_tree = _by_device(_link_tree)
mix_kv = _by_device(_mix_kv)
move_kv = _by_device(_move_kv)
pack_bits = _by_device(_pack_bits)
pack_tree_mask = _by_device(_pack_tree_mask)
sample_and_walk = _by_device(_sample_and_walk)
score_frontier = _by_device(_score_frontier)
sum_kv = _by_device(_sum_kv)
top_tokens = _by_device(_top_tokens)
