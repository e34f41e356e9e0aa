"""The ops that callers use. Each has its definition in `reference` under the same name."""

from specstack_kernels.torch_ops.accept_greedy import accept_greedy
from specstack_kernels.torch_ops.filter_probs import filter_probs
from specstack_kernels.torch_ops.link_tree import link_tree
from specstack_kernels.torch_ops.sample_and_walk import invert_cdf, sample_and_walk

__all__ = ["accept_greedy", "filter_probs", "invert_cdf", "link_tree", "sample_and_walk"]
