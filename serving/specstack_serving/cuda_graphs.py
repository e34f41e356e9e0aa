"""Captured verify steps: one CUDA-graph runner per verify width, with the tree mask.

SGLang 0.5.23 captures TARGET_VERIFY for any algorithm, but makes the input that a graph is captured
with for its own ones alone: a plug-in's graph would have no mask and no hidden states. Hooks make
that input, and keep the batch sizes of a width to those that the budget lets run at it.
None of this has been run on a GPU; what CPUs allow is tested (tests/serving/test_cuda_graphs.py).

Letters: N nodes of a width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specstack.graph_shapes import DECODE_BACKEND, GraphShape
from specstack_serving import sglang_compat as sgl
from specstack_serving.verify_input import TreeVerifyInput

logger = logging.getLogger(__name__)


class GraphRunners:
    """The runners of a plan's widths, and the hooks that they are captured under.

    In this order: construct and `install` before the engine captures (the worker's constructor),
    `build` after it has (`init_cuda_graphs`), `activate` around every verify forward.
    """

    def __init__(
        self, shapes: Sequence[GraphShape], model_runner: Any, capture_hidden_mode: Any
    ) -> None:
        """Nothing is captured yet.

        Args:
            shapes: of the plan, width rising; not empty.
            capture_hidden_mode: of every verify forward; one that asks for more than its graph
                was captured with is refused by the engine.
        """
        self._shapes = {shape.width: shape for shape in shapes}
        self._model_runner = model_runner
        self._hidden_mode = capture_hidden_mode
        self._captured: dict[int, tuple[Any, Any]] = {}
        """Width -> (attention backend, graph runner)."""
        self._said: set[int] = set()

    # -- hooks --------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the hooks in place, in the process that captures.

        Raises RuntimeError where the engine could not apply one (it only logs that).
        """
        hooks: dict[str, Callable[..., Any]] = {
            "DecodeCudaGraphRunner_get_spec_info": self.captured_input,
            "create_dummy_verify_input": self.dummy_input,
            "get_batch_sizes_to_capture": self.batch_sizes,
            "ModelRunner_max_decode_logits_rows": self.logits_rows,
        }
        for name, hook in hooks.items():
            sgl.HookRegistry.register(sgl.target(name), hook, sgl.HookType.AROUND)
        sgl.HookRegistry.apply_hooks()
        for name in hooks:
            if not hasattr(sgl.resolve(sgl.SEAMS[name].path), "__wrapped__"):
                raise RuntimeError(
                    f"SGLang did not take the hook on {sgl.target(name)} (its log says why), and"
                    f" graphs have no tree mask without it: remove engine.args.{DECODE_BACKEND}"
                )

    def captured_input(self, original: Callable[..., Any], runner: Any, num_tokens: int) -> Any:
        """AROUND DecodeCudaGraphRunner.get_spec_info: the input that a graph is captured with."""
        if not self._is_ours(runner.model_runner.spec_algorithm):
            return original(runner, num_tokens)
        return self._verify_input(runner.buffers.custom_mask, runner.captured_req_width)

    def dummy_input(
        self,
        original: Callable[..., Any],
        spec_algorithm: Any,
        custom_mask: Any,
        num_tokens_per_req: int,
        is_draft_worker: bool,
    ) -> Any:
        """AROUND create_dummy_verify_input: the input of a warm-up forward before capture."""
        if not self._is_ours(spec_algorithm):
            return original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
        return self._verify_input(custom_mask, num_tokens_per_req)

    def batch_sizes(
        self,
        original: Callable[..., Any],
        model_runner: Any,
        captured_req_width: int = 1,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """AROUND get_batch_sizes_to_capture: no batches that never run at the width."""
        capture, compiled = original(model_runner, captured_req_width, **kwargs)
        shape = self._shapes.get(captured_req_width)
        if shape is None:
            return capture, compiled
        kept = shape.batch_sizes(capture)
        return kept, [size for size in compiled if size in kept]

    def logits_rows(self, original: Callable[..., Any], model_runner: Any) -> int:
        """AROUND ModelRunner.max_decode_logits_rows: rows of the logits that all graphs share.

        The engine counts the widest width alone; a narrower one may run larger batches.
        """
        gathers = any(model_runner.decode_graph_gather_requirements())
        rows = [original(model_runner)]
        for width in self._shapes:
            sizes, _ = sgl.get_batch_sizes_to_capture(
                model_runner, width, gathered_buffer_required=gathers
            )
            rows.append(width * max(sizes))
        return max(rows)

    def _is_ours(self, spec_algorithm: Any) -> bool:
        return spec_algorithm is self._model_runner.spec_algorithm

    def _verify_input(self, custom_mask: Any, width: int) -> TreeVerifyInput:
        """The shape of a tree and no tree: captures read sizes and the mask's presence."""
        return TreeVerifyInput(
            draft_token=None,
            custom_mask=custom_mask,
            positions=None,
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=width - 1,
            topk=1 if width == 1 else 2,
            draft_token_num=width,
            capture_hidden_mode=self._hidden_mode,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    # -- runners ------------------------------------------------------------------------------

    def build(self) -> None:
        """Take the engine's runner for the widest width and capture one for each other.

        Raises RuntimeError where the engine has captured nothing, another width, or no mask.
        """
        runner, widest = self._model_runner, max(self._shapes)
        self._add(widest, runner.attn_backend, runner.decode_cuda_graph_runner)
        for width in sorted(self._shapes, reverse=True)[1:]:
            # Read by attention backends while they are made, and by nobody else meanwhile.
            with sgl.get_spec().override(speculative_num_draft_tokens=width):
                attention = self._new_attention_backend()
                graphs = sgl.DecodeCudaGraphRunner(
                    runner, attn_backend=attention, speculative_num_draft_tokens=width
                )
            self._add(width, attention, graphs)

    def _new_attention_backend(self) -> Any:
        """A backend with buffers of its own, as every graph bakes the addresses of its own in."""
        runner = self._model_runner
        before = runner.init_new_workspace
        try:
            return runner._get_attention_backend(init_new_workspace=True)
        finally:
            runner.init_new_workspace = before

    def _add(self, width: int, attention: Any, graphs: Any) -> None:
        if graphs is None:
            raise RuntimeError(
                f"SGLang captured no verify step, although engine.args.{DECODE_BACKEND} asks for"
                " it: its log says why; an argument like disable_cuda_graph may be the reason"
            )
        if graphs.captured_req_width != width:
            raise RuntimeError(
                f"SGLang captured verify steps of {graphs.captured_req_width} nodes per request"
                f" instead of {width}: remove engine.args.{DECODE_BACKEND}"
            )
        made = graphs.get_spec_info(width)
        if not isinstance(made, TreeVerifyInput):
            raise RuntimeError(
                f"SGLang captured the verify step with {type(made).__name__} instead of a tree:"
                f" remove engine.args.{DECODE_BACKEND}"
            )
        self._captured[width] = (attention, graphs)
        logger.info("verify steps of %d nodes: graphs for batches %s", width, graphs.capture_bs)

    @contextmanager
    def activate(self, width: int) -> Iterator[None]:
        """Forward through the graphs of `width` inside, and as before outside.

        A batch that no graph holds runs eagerly inside, as the engine decides per forward.
        """
        runner = self._model_runner
        if width not in self._captured:
            # A width that no step of the budget reaches: the engine runs other widths eagerly.
            yield
            return
        before = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self._captured[width]
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = before

    def fell_back(self, width: int, num_requests: int, can_run_cuda_graph: bool) -> bool:
        """Whether a forward inside `activate(width)` ran eagerly; the log says so once a width."""
        if not can_run_cuda_graph and width not in self._said:
            self._said.add(width)
            logger.warning(
                "no graph for %d requests of %d nodes: this verify step, and others like it, ran"
                " eagerly (cuda_graph_max_bs_decode sets the largest batch captured)",
                num_requests,
                width,
            )
        return not can_run_cuda_graph
