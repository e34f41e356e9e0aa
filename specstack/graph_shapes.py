"""Which verify steps are captured as CUDA graphs: widths, and the batches that each is for.

A graph has one width (nodes per request, root included). A round runs at a width of at most its
budget plus one, so that a wide graph is of use only to the batches that the budget lets draft
that much; captures for larger ones would cost memory and start-up time for nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from specstack.resolve import Steps

if TYPE_CHECKING:
    from specstack.plan import Plan

DECODE_BACKEND = "cuda_graph_backend_decode"
"""The argument of SGLang that asks for graphs of decode (and so of verify) steps."""
CAPTURED = "full"
"""Its value for whole steps, the only one that verify steps are captured with."""
DISABLED = "disabled"
GRAPH_BACKENDS = ("triton", "flashinfer")
"""Attention backends that take a tree mask of any width into a graph."""
_INDEX_BYTES = 8


class GraphShape(BaseModel):
    """The graphs of one verify width."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int
    """Nodes per request, root included."""
    max_batch: int | None
    """Largest batch that can run at this width; None: any."""

    def batch_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Those of `sizes` (rising) to capture: up to the first that holds the largest batch."""
        if self.max_batch is None:
            return list(sizes)
        return list(sizes[: bisect_left(sizes, self.max_batch) + 1])


def graph_shapes(widths: Sequence[int], steps: Steps) -> tuple[GraphShape, ...]:
    """Return one shape per width that a step of the budget reaches, and one for plain decoding.

    Args:
        widths: of the plan's verify steps, rising.
        steps: (largest batch or None, drafts per request) of the budget.
    """
    shapes = []
    for width in widths:
        batches = [batch for batch, budget in steps if budget + 1 >= width]
        if width == 1 or None in batches:
            shapes.append(GraphShape(width=width, max_batch=None))
        elif batches:
            largest = max(batch for batch in batches if batch is not None)
            shapes.append(GraphShape(width=width, max_batch=largest))
    return tuple(shapes)


def wants_graphs(device: str, speculates: bool, args: dict[str, Any]) -> bool:
    """Whether a pipeline asks for captured verify steps; never so by default."""
    return device == "cuda" and speculates and args.get(DECODE_BACKEND) == CAPTURED


def graph_index_bytes(plan: Plan) -> int | None:
    """What triton's graphs keep per width at least: a KV index per node and context position.

    Buffers of SGLang 0.5.23 (TritonAttnBackend.init_cuda_graph_state): int64 indices and a byte
    of mask for every position that a node may see. None where sizes are left to SGLang.
    """
    facts = plan.target.facts
    context = plan.engine.context_length or (facts.max_position_embeddings if facts else None)
    if context is None:
        return None
    total = 0
    for shape in plan.graphs:
        if (sizes := stated_batch_sizes(plan, shape)) is None:
            return None
        nodes = shape.width * max(sizes)
        total += nodes * context * _INDEX_BYTES + nodes * (context + shape.width)
    return total


def stated_batch_sizes(plan: Plan, shape: GraphShape) -> list[int] | None:
    """Return the batch sizes that a width is captured for; None where SGLang chooses them."""
    sizes = plan.engine.args.get("cuda_graph_bs_decode")
    return shape.batch_sizes(sorted(set(sizes))) if sizes else None


def described(plan: Plan, shape: GraphShape) -> str:
    """Say what is captured of a width."""
    sizes = stated_batch_sizes(plan, shape)
    if sizes is not None:
        return f"batches of {', '.join(map(str, sizes))}"
    most = "" if shape.max_batch is None else f" up to {shape.max_batch}"
    return f"SGLang's batch sizes{most}"
