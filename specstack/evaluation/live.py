"""The target itself: every tree goes through its layers, one request after the other.

Slow and plain: it decodes prompts whose answers are not known, and is what a replay must equal.
Attention must reach back over the whole text: sliding windows are not applied. Letters: B requests,
N nodes, P committed tokens, Q new tokens, K path width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specstack.drafters.base import FeatureNeeds
from specstack.evaluation.observed import Observed, cut_at_end
from specstack.evaluation.running import KvTable, committed_path, committed_prompts
from specstack.models.heads.features import TargetFeatures
from specstack.training.target_model import FrozenTarget
from specstack.types import (
    AcceptResult,
    CommittedTokens,
    DraftBatch,
    DraftTree,
    Drawing,
    NodeLogits,
    SamplingTensors,
)
from specstack.verify.base import VerifyRule
from specstack.verify.uniforms import seeded_uniforms


@dataclass(frozen=True)
class Sampling:
    """How the target chooses; at temperature 0, its best token."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256


@dataclass
class _Request:
    """One text so far."""

    prompt: tuple[int, ...]
    seed: int
    cache: Any
    output: list[int]

    @property
    def seq_len(self) -> int:
        """Committed tokens: all but the last emitted one."""
        return len(self.prompt) + len(self.output) - 1


class LiveTarget:
    """Prompts of one batch; prompt i is in slot i."""

    observed: Observed

    def __init__(
        self,
        target: FrozenTarget,
        prompts: Sequence[tuple[int, ...]],
        rule: VerifyRule,
        sampling: Sampling,
        end_tokens: frozenset[int],
        table: KvTable,
        needs: FeatureNeeds | None,
        *,
        seeds: Sequence[int],
    ) -> None:
        """Begin before the prompts.

        Args:
            rule: chooses the first token of each answer.
            end_tokens: end an answer.
            seeds: per prompt, added to the seed of `sampling`.
        """
        from transformers import DynamicCache

        self._target, self._rule, self._sampling = target, rule, sampling
        self._end_tokens, self._table, self._needs = end_tokens, table, needs
        self._device = target.tables.embedding.device
        self._requests = [
            _Request(prompt, sampling.seed + seed, DynamicCache(), [])
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        self.slots: list[int] = list(range(len(prompts)))
        self._before: DraftBatch
        self._packed: list[TargetFeatures] = []

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """What was emitted, per slot."""
        return [tuple(request.output) for request in self._requests]

    @property
    def _going(self) -> list[_Request]:
        return [self._requests[slot] for slot in self.slots]

    @property
    def bonus_tokens(self) -> Int[Tensor, " B"]:
        """The roots."""
        return torch.tensor([r.output[-1] for r in self._going], device=self._device)

    @property
    def seq_lens(self) -> Int[Tensor, " B"]:
        """Committed tokens."""
        return torch.tensor([r.seq_len for r in self._going], device=self._device)

    def prefill(self) -> CommittedTokens | None:
        """Run the prompts and choose the first tokens."""
        found = []
        for request in self._requests:
            tokens = torch.tensor(request.prompt, device=self._device)
            num = len(tokens)
            causal = torch.ones(num, num, dtype=torch.bool, device=self._device).tril()
            places = torch.arange(num, device=self._device)
            logits, features = self._forward(request, tokens, places, causal)
            tree = DraftTree.root_only(tokens[-1:])
            uniforms = self._sampling_of([request], [num], 1)
            rows = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
            accepted = self._rule.accept(tree, NodeLogits(logits[-1:], rows), uniforms, max_depth=0)
            request.output.append(int(accepted.emitted[0, 0]))
            found.append(features)
        if self._needs is None:
            return None
        texts = [(*r.prompt, r.output[0]) for r in self._requests]
        return committed_prompts(self.slots, self._table, texts, _joined(found), self._device)

    def draft_batch(self) -> DraftBatch:
        """The requests that go on."""
        batch = self._table.batch(
            self.slots, self.bonus_tokens, self.seq_lens, self._needs is not None
        )
        temperature = torch.full((len(self.slots),), self._sampling.temperature or 1.0)
        drawing = Drawing(
            temperature.to(self._device),
            torch.full_like(temperature, self._sampling.temperature == 0).bool().to(self._device),
            torch.tensor([request.seed for request in self._going], device=self._device),
        )
        return replace(batch, drawing=drawing)

    def verify(self, tree: DraftTree) -> NodeLogits:
        """Run the live nodes of every tree under its mask."""
        values: list[Tensor] = []
        rows = torch.zeros_like(tree.tokens)
        self._packed = []
        total = 0
        for b, request in enumerate(self._going):
            num, before = int(tree.num_nodes[b]), request.seq_len
            prefix = torch.ones(num, before, dtype=torch.bool, device=self._device)
            mask = torch.cat([prefix, tree.tree_mask[b, :num, :num]], dim=1)
            logits, features = self._forward(
                request, tree.tokens[b, :num], before + tree.depth[b, :num], mask
            )
            values.append(logits)
            self._packed.append(features)
            node = torch.arange(tree.num_draft_tokens, device=self._device)
            rows[b] = total + torch.where(node < num, node, 0)
            total += num
        return NodeLogits(torch.cat(values), rows)

    def sampling(self, num_positions: int) -> SamplingTensors:
        """Uniforms that depend on the seed and the position of a token alone."""
        firsts = [request.seq_len + 1 for request in self._going]
        return self._sampling_of(self._going, firsts, num_positions)

    def commit(self, tree: DraftTree, accepted: AcceptResult) -> AcceptResult:
        """Keep the path's KV, up to the end of the answer."""
        self._before = self.draft_batch()
        rows = zip(self._going, accepted.emitted.tolist(), accepted.accept_lens.tolist(),
                   strict=True)  # fmt: skip
        num_left = [self._num_left(request, row[:length]) for request, row, length in rows]
        accepted, self.observed = cut_at_end(accepted, torch.tensor(num_left, device=self._device))
        for b, request in enumerate(self._going):
            length = int(accepted.accept_lens[b])
            self._keep(request, accepted.accept_index[b, :length])
            request.output += accepted.emitted[b, :length].tolist()
        return accepted

    def committed(self, tree: DraftTree, accepted: AcceptResult) -> CommittedTokens | None:
        """The features of the accepted paths."""
        if self._needs is None:
            return None
        found = [
            features.index(nodes.clamp(min=0))
            for features, nodes in zip(self._packed, accepted.accept_index, strict=True)
        ]
        return committed_path(self._before, self._table, accepted, _joined(found))

    def drop_finished(self) -> None:
        """Let those go whose answer has ended."""
        self.slots = [slot for slot in self.slots if not self._is_finished(self._requests[slot])]

    def _is_finished(self, request: _Request) -> bool:
        is_full = len(request.output) >= self._sampling.max_new_tokens
        return is_full or request.output[-1] in self._end_tokens

    def _num_left(self, request: _Request, emitted: Sequence[int]) -> int:
        """Tokens up to the end of the answer, as far as these show it."""
        limit = self._sampling.max_new_tokens - len(request.output)
        ends = [i + 1 for i, token in enumerate(emitted) if token in self._end_tokens]
        return min([limit, *ends])

    def _keep(self, request: _Request, nodes: Int[Tensor, " K"]) -> None:
        """Drop the KV of all other nodes. The request's output is still the old one."""
        before = torch.arange(request.seq_len, device=self._device)
        kept = torch.cat([before, request.seq_len + nodes])
        for layer in request.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]

    def _sampling_of(
        self, requests: Sequence[_Request], firsts: Sequence[int], num_positions: int
    ) -> SamplingTensors:
        """As `sampling`, for tokens at positions firsts[i], .."""
        sampling, num = self._sampling, len(requests)
        is_greedy = sampling.temperature == 0
        ones = torch.ones(num, device=self._device)
        seeds = torch.tensor([request.seed for request in requests], device=self._device)
        places = torch.tensor(firsts, device=self._device)[:, None]
        places = places + torch.arange(num_positions, device=self._device)
        return SamplingTensors(
            temperature=ones if is_greedy else ones * sampling.temperature,
            top_k=ones.long() if is_greedy else ones.long() * 2**30,
            top_p=ones * sampling.top_p,
            min_p=ones * 0,
            uniforms=seeded_uniforms(seeds, places),
            is_all_greedy=is_greedy,
            use_top_k_top_p=sampling.top_p < 1,
        )

    def _forward(
        self,
        request: _Request,
        tokens: Int[Tensor, " Q"],
        positions: Int[Tensor, " Q"],
        mask: Bool[Tensor, "Q P+Q"],
    ) -> tuple[Float[Tensor, "Q V"], TargetFeatures]:
        """Run new tokens behind the request's cache, which keeps them."""
        model, needs = self._target.model, self._needs
        taps: dict[int, Tensor] = {}
        layers = () if needs is None else needs.target_layers
        handles = [model.model.layers[i].register_forward_hook(_keep_in(taps, i)) for i in layers]
        refused = torch.finfo(model.dtype).min
        additive = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
        try:
            output = model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=additive.masked_fill(~mask, refused)[None, None],
                past_key_values=request.cache,
                use_cache=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        kept = [] if needs is None else [request.cache.layers[i] for i in needs.kv_layers]
        num = len(tokens)
        features = TargetFeatures(
            torch.stack([taps[i][0] for i in layers], dim=1) if layers else None,
            torch.stack([_last(k.keys, num) for k in kept], dim=1) if kept else None,
            torch.stack([_last(k.values, num) for k in kept], dim=1) if kept else None,
        )
        return output.logits[0].float(), features.to(dtype=torch.float32)


def _keep_in(taps: dict[int, Tensor], layer: int) -> Any:
    def keep(module: Any, inputs: Any, output: Any) -> None:
        taps[layer] = output[0] if isinstance(output, tuple) else output

    return keep


def _last(cached: Float[Tensor, "1 G P C"], num: int) -> Float[Tensor, "Q G C"]:
    return cached[0, :, -num:].transpose(0, 1)


def _joined(parts: Sequence[TargetFeatures]) -> TargetFeatures:
    """[T ..] of all, one after the other."""

    def cat(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)

    return TargetFeatures(cat("hidden"), cat("keys"), cat("values"))
