"""The worker that SGLang's scheduler drives: prefill, then one speculative round per decode.

The round itself is `specstack.round`; here is what belongs to the engine: the verify batch, KV
slots, publishing, log-probabilities, agreement across ranks.

Letters: B requests, N tree nodes, K path width, V vocabulary. SGLang's convention: `seq_lens`
counts committed KV and excludes the pending bonus token, which is the root of the next tree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specstack.bind import bind
from specstack.drafters.base import Drafter
from specstack.round import Speculator
from specstack.types import (
    AcceptResult,
    CommittedTokens,
    DraftBatch,
    DraftTree,
    NodeLogits,
    SamplingTensors,
)
from specstack_serving import sglang_compat as sgl
from specstack_serving.admission import wants_speculation
from specstack_serving.budgeting import make_control
from specstack_serving.carrier import current_plan
from specstack_serving.cuda_graphs import GraphRunners
from specstack_serving.features import FeatureReader, draft_batch
from specstack_serving.kv_move import move_paths
from specstack_serving.load import PromptTally, load_of
from specstack_serving.logits import adjust_logits, needs_output_history
from specstack_serving.ranks import AgreedDrafter, agree
from specstack_serving.sampling import UniformSource, drawing, sampling_tensors
from specstack_serving.verify_input import (
    DraftState,
    pack_nodes,
    verify_batch,
    window_slots,
)


class SpecstackWorker(sgl.BaseSpecWorker):  # type: ignore[misc]
    """Owns the plan's parts and the target worker."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        plan = current_plan()
        assert plan is not None
        self._target_worker = target_worker
        parts = bind(plan)
        assert parts.drafter is not None
        self.runs_on_cpu = plan.engine.attention_backend == "specstack_cpu"
        """No graphs: every width is as good as the next, and dead nodes need no row."""
        widths = plan.shapes.verify_widths
        if self.runs_on_cpu:
            widths = tuple(range(1, max(widths) + 1))
        self._drafter: Drafter = parts.drafter
        group = sgl.get_parallel().tp_group
        if parts.drafter.needs is not None and group.world_size > 1:
            self._drafter = AgreedDrafter(parts.drafter, group)
        self._speculator = Speculator(self._drafter, parts.tree_builder, parts.verify_rule, widths)
        self._features: FeatureReader | None = None
        if parts.drafter.needs is not None:
            self._features = FeatureReader(parts.drafter.needs, target_worker.model_runner)
        self._graphs: GraphRunners | None = None
        if plan.graphs:
            reader = self._features
            mode = sgl.CaptureHiddenMode.NULL if reader is None else reader.capture_mode
            self._graphs = GraphRunners(plan.graphs, target_worker.model_runner, mode)
            self._graphs.install()
        self._uniforms = UniformSource(sgl.get_device().device, target_worker.random_seed)
        self.control = make_control(plan, parts)
        """Of the scheduler process: decides budgets, reports rounds, obeys `/specstack`."""
        self._reporter = self.control.reporter
        self._prompts = PromptTally()
        self.speculative_num_draft_tokens = plan.shapes.max_draft_budget + 1
        """Read by SGLang's own gauge; follows the width of the last round."""

    @property
    def draft_worker(self) -> None:
        """No draft ModelRunner."""

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        """The pools are there: the drafter can mirror them."""
        super().alloc_memory_pool(**kwargs)
        if self._features is not None:
            num_slots = len(kwargs["req_to_token_pool"].req_to_token)
            self._drafter.attach(self._features.runtime(num_slots))

    def init_cuda_graphs(self) -> None:
        """The engine has captured the widest verify step: capture the others."""
        super().init_cuda_graphs()
        if self._graphs is not None:
            self._graphs.build()

    def clear_cache_pool(self) -> None:
        """The engine empties its caches, its server being idle."""
        self._speculator.forget()

    def graphs_of(self, width: int) -> AbstractContextManager[None]:
        """Around a verify forward of `width` nodes per request."""
        return nullcontext() if self._graphs is None else self._graphs.activate(width)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Run a prefill or one round; called by the scheduler on the forward stream."""
        publish = on_publish or (lambda _: None)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, publish)
        return self._decode(batch, publish)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Accept counts of the oldest unreported round, now on the host."""
        self._reporter.verified(num_correct_drafts_per_req)

    def _prefill(self, batch: Any, publish: Callable[[Tensor], None]) -> Any:
        """Run the target over the prompts; a finished prompt starts a slot of the drafter."""
        self._reporter.prefilled(*self._prompts.take(batch))
        own_sampling = self._needs_own_sampling(batch)
        reader = self._features
        result = self._target_worker.forward_batch_generation(
            batch,
            is_verify=own_sampling,
            capture_hidden_mode=None if reader is None else reader.capture_mode,
        )
        slots = [req.kv.req_pool_idx for req in batch.reqs]
        for slot, req in zip(slots, batch.reqs, strict=True):
            tokens = req.get_fill_ids()
            prompt_len = len(req.origin_input_ids)
            self._speculator.begin(slot, tokens[:prompt_len], tokens[prompt_len:])
        if own_sampling:
            result.next_token_ids = self._sample_prefill(batch, slots, result.logits_output)
        publish(batch.seq_lens)
        next_tokens = result.next_token_ids
        self._speculator.emitted(slots, next_tokens[:, None], torch.ones_like(next_tokens))
        if reader is not None:
            hidden = reader.take_hidden(result.logits_output)
            self._speculator.absorb(reader.prefilled(batch, slots, hidden, next_tokens))
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = DraftState(next_tokens, batch.seq_lens)
        return result

    def _needs_own_sampling(self, batch: Any) -> bool:
        """The engine samples the first token itself, ignoring seeds and earlier penalties."""
        if batch.is_prefill_only:
            return False
        seeded = any(
            req.sampling_params.sampling_seed is not None and req.sampling_params.top_k != 1
            for req in batch.reqs
        )
        return seeded or (needs_output_history(batch) and any(r.output_ids for r in batch.reqs))

    def _sample_prefill(self, batch: Any, slots: list[int], logits_output: Any) -> Tensor:
        """Accept over trees of a root alone: sampling as in any other round."""
        tree = DraftTree.root_only(torch.zeros_like(batch.seq_lens, dtype=torch.int64))
        logits = NodeLogits(logits_output.next_token_logits, pack_nodes(tree, ragged=False).rows)
        adjust_logits(logits, tree, batch, lambda i: self._speculator.output_tokens(slots[i]))
        sampling = sampling_tensors(batch, self._uniforms, batch.seq_lens - 1, num_positions=1)
        accepted = agree(self._speculator.accept(tree, logits, sampling))
        if batch.return_logprob:
            sgl.compute_spec_logprobs(
                batch,
                logits_output,
                accepted.emitted.reshape(-1),
                accept_index=logits.rows,
            )
            logits_output.next_token_logprobs = logits_output.next_token_logprobs[:, 0]
        return accepted.emitted[:, 0]

    def _decode(self, batch: Any, publish: Callable[[Tensor], None]) -> Any:
        """One round over the running requests."""
        slots = _slots(batch)
        wanted = [wants_speculation(req.sampling_params.custom_params) for req in batch.reqs]
        speculate = [w and not r.finished() for w, r in zip(wanted, batch.reqs, strict=True)]
        load = load_of(batch, wanted)
        budget = self._reporter.decide(load)
        target = _BatchTarget(self, batch, slots, publish)
        outcome = self._speculator.round(
            slots, target.draft_batch().bonus_tokens, speculate, budget, target
        )
        tree, accepted = outcome.tree, outcome.accepted
        reqs = list(batch.reqs)
        fell_back = self._graphs is not None and self._graphs.fell_back(
            tree.num_draft_tokens, len(slots), target.can_run_cuda_graph
        )
        self._reporter.ran(
            outcome,
            load,
            lambda: [req.finished() for req in reqs],
            is_eager_fallback=fell_back,
        )
        self.speculative_num_draft_tokens = tree.num_draft_tokens
        logits_output = target.logits_output
        if batch.return_logprob:
            _write_logprobs(batch, logits_output, target.logits, accepted)
        return sgl.GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=accepted.emitted.reshape(-1),
            accept_lens=accepted.accept_lens,
            new_seq_lens=target.new_seq_lens,
            next_draft_input=DraftState(accepted.bonus_tokens, target.new_seq_lens),
            can_run_cuda_graph=target.can_run_cuda_graph,
            speculative_num_draft_tokens=tree.num_draft_tokens,
            speculative_output_stride=accepted.emitted.shape[1],
            extra_keep_alive_refs=[target],
        )


class _BatchTarget:
    """`specstack.round.Target` over one ScheduleBatch."""

    def __init__(
        self,
        worker: SpecstackWorker,
        batch: Any,
        slots: list[int],
        publish: Callable[[Tensor], None],
    ) -> None:
        self._worker = worker
        self._batch = batch
        self._slots = slots
        self._publish = publish
        self._seq_lens = batch.seq_lens
        reads_features = worker._features is not None
        self._before = draft_batch(
            batch,
            slots,
            batch.spec_info.bonus_tokens,
            batch.seq_lens,
            int(batch.seq_lens_cpu.max()) if reads_features else 0,
        )
        if worker._drafter.draws:
            self._before = replace(self._before, drawing=drawing(batch, worker._uniforms))
        self.logits_output: Any = None
        self.logits: NodeLogits
        self.new_seq_lens: Tensor
        self.can_run_cuda_graph = False

    def draft_batch(self) -> DraftBatch:
        """Rows of the token table; none for a drafter that reads tokens alone."""
        return self._before

    def verify(self, tree: DraftTree) -> NodeLogits:
        """Run the target over the trees and adjust its logits."""
        batch, model_runner = self._batch, self._worker.target_worker.model_runner
        self._window = window_slots(batch, tree.num_draft_tokens)
        on_cpu = self._worker.runs_on_cpu
        packed = pack_nodes(tree, ragged=on_cpu)
        reader = self._worker._features
        with self._worker.graphs_of(tree.num_draft_tokens):
            self._forward_batch = verify_batch(
                batch,
                model_runner,
                tree,
                self._window,
                packed,
                window_mask=on_cpu,
                capture_hidden_mode=reader.capture_mode if reader else sgl.CaptureHiddenMode.NULL,
            )
            out = self._worker.target_worker.forward_batch_generation(
                batch=None, forward_batch=self._forward_batch, is_verify=True
            )
        self.logits_output, self.can_run_cuda_graph = out.logits_output, out.can_run_cuda_graph
        self.logits = NodeLogits(self.logits_output.next_token_logits, packed.rows)
        self._hidden = reader.take_hidden(self.logits_output) if reader else None
        speculator = self._worker._speculator
        adjust_logits(
            self.logits,
            tree,
            batch,
            lambda i: speculator.output_tokens(self._slots[i]),
            packed.computed,
        )
        return self.logits

    def sampling(self, num_positions: int) -> SamplingTensors:
        """Uniforms are counted from the root's position."""
        return sampling_tensors(
            self._batch, self._worker._uniforms, self._seq_lens, num_positions=num_positions
        )

    def commit(self, tree: DraftTree, accepted: AcceptResult) -> AcceptResult:
        """Compact the accepted paths to the front of their windows and publish."""
        accepted = agree(accepted)
        if tree.num_draft_tokens > 1:
            pool = self._worker.token_to_kv_pool_allocator.get_kvcache()
            move_paths(pool, self._window, accepted.accept_index)
        self.new_seq_lens = self._seq_lens + accepted.accept_lens.to(self._seq_lens.dtype)
        self._publish(self.new_seq_lens)
        return accepted

    def committed(self, tree: DraftTree, accepted: AcceptResult) -> CommittedTokens | None:
        """Features of the accepted paths."""
        if (reader := self._worker._features) is None:
            return None
        return reader.verified(self._before, self._window, self._hidden, self.logits.rows, accepted)


def _slots(batch: Any) -> list[int]:
    """The row of each request.

    Results of a grammar batch are processed before the next one runs: a request that ended is
    still in it, its row released and known to the device copy alone.
    """
    slots = [req.kv.req_pool_idx for req in batch.reqs]
    return batch.req_pool_indices.tolist() if None in slots else slots


def _write_logprobs(
    batch: Any, logits_output: Any, logits: NodeLogits, accepted: AcceptResult
) -> None:
    """Log-probabilities of the emitted tokens, at the nodes that emitted them."""
    rows = logits.rows.gather(1, accepted.accept_index.clamp(min=0))
    is_emitted = accepted.accept_index >= 0
    predict = torch.zeros(len(logits.values), dtype=torch.int64, device=rows.device)
    # Padding points at the root's row with token 0, which the root's own token outbids.
    emitted = torch.where(is_emitted, accepted.emitted, 0)
    predict.scatter_reduce_(0, rows.reshape(-1), emitted.reshape(-1), "amax")
    sgl.compute_spec_logprobs(batch, logits_output, predict, accept_index=rows)
