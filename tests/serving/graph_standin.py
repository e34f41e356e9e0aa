"""SGLang's own DecodeCudaGraphRunner on a CPU: recorded forwards stand in for CUDA graphs.

What a graph would bake in, a recording holds: the ForwardBatch that was captured, over the
runner's static buffers, and the metadata of the runner's own attention backend. A replay runs the
model again on them. Streams, kernels and memory are not stood in for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu.attention_backend import CpuAttentionBackend


class RecordedForwards:
    """The interface of BaseCudaGraphBackend."""

    def __init__(self, runner: Any) -> None:
        self._forwards: dict[Any, Callable[[], Any]] = {}

    def capture_session(self, stream: Any) -> Any:
        return nullcontext()

    replay_session = nullcontext

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Any = None,
    ) -> None:
        forward_fn()
        self._forwards[shape_key] = forward_fn

    def replay(self, shape_key: Any, static_forward_batch: Any, **_: Any) -> Any:
        return self._forwards[shape_key]()


class GraphAttention(CpuAttentionBackend):
    """The CPU's attention with a static mask that replays fill, as GPU backends have it."""

    dllm_attention = None

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.width = sgl.get_spec().speculative_num_draft_tokens

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        assert max_num_tokens == max_bs * self.width, "made for another width"
        self.static_mask = torch.zeros(max_bs * self.width**2, dtype=torch.bool)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        mask = forward_batch.spec_info.custom_mask  # None: captured without a tree
        size = forward_batch.batch_size * self.width**2
        self.static_mask[:size] = True
        self.static_mask[: min(size, len(mask))] = mask[:size]
        spec_info = SimpleNamespace(
            custom_mask=self.static_mask[:size], draft_token_num=self.width, computed_nodes=None
        )
        self.init_forward_metadata(
            SimpleNamespace(**{**vars(forward_batch), "spec_info": spec_info})
        )

    def shared_read_ends(self, forward_mode: Any) -> Any:
        """No scheduler runs beside it."""
        return None

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        pass


@contextmanager
def stand_in(model_runner: Any) -> Iterator[Callable[[], Any]]:
    """Make the engine capture recordings; yields what its own start-up does for the widest."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as engine
    from sglang.srt.runtime_context import get_exec

    engine.graph_capture = lambda stream: nullcontext(SimpleNamespace(stream=None))
    engine.get_or_create_global_graph_capture_stream = lambda: None
    engine.resolve_decode_backend = RecordedForwards
    torch.cpu.is_current_stream_capturing = lambda: False
    sgl.ForwardMode.is_cpu_graph = sgl.ForwardMode.is_cuda_graph
    model_runner._get_attention_backend = lambda init_new_workspace: GraphAttention(model_runner)
    decode = PhaseConfig(backend="full", max_bs=8, bs=[1, 2, 4, 8])

    def capture() -> None:
        model_runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(model_runner)
        model_runner.attn_backend = GraphAttention(model_runner)
        model_runner.decode_cuda_graph_runner = engine.DecodeCudaGraphRunner(model_runner)

    with get_exec().graph.override(cuda_graph_config=CudaGraphConfig(decode=decode)):
        yield capture
