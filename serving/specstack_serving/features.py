"""What a head drafter reads from the engine: tapped hidden states, the target's KV, its tables.

Hidden states come out of a forward packed ([T, n * D], taps in the order of the layers); keys and
values are read from the pool where the forward has put them. Letters: B requests, N tree nodes,
K path width, T packed tokens, n taps, m KV layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specstack.drafters.base import DraftRuntime, FeatureNeeds
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.tables import TargetTables
from specstack.types import AcceptResult, CommittedTokens, DraftBatch
from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu.linear import pack_head
from specstack_serving.ranks import gathered


class FeatureReader:
    """Makes a model runner deliver what a drafter needs."""

    def __init__(
        self,
        needs: FeatureNeeds,
        model_runner: Any,
        gather: Callable[[Tensor, int], Tensor] = gathered,
    ) -> None:
        """Raises ValueError where the model cannot: it has no such taps or no such pool.

        Args:
            gather: puts together, along a dimension, what ranks hold parts of.
        """
        self._needs = needs
        self._runner = model_runner
        self._gather = gather
        if needs.target_layers:
            model = model_runner.model
            if not hasattr(model, "set_dflash_layers_to_capture"):
                raise ValueError(
                    f"{type(model).__name__} gives no hidden states of single layers, which the "
                    "draft head reads: use a head with context.source kv, or another target"
                )
            model.set_dflash_layers_to_capture(sorted(needs.target_layers))

    @property
    def capture_mode(self) -> Any:
        """For forwards whose hidden states are read."""
        mode = sgl.CaptureHiddenMode
        return mode.FULL if self._needs.target_layers else mode.NULL

    def runtime(self, num_slots: int) -> DraftRuntime:
        """What the drafter is lent; `num_slots` bounds the rows of the token table."""
        model, pool = self._runner.model, self._runner.token_to_kv_pool
        vocab_size = self._runner.model_config.vocab_size  # the engine's tables are padded
        tables = [model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()]
        if tables[0].data_ptr() == tables[1].data_ptr():
            tables = tables[:1]
        whole = [self._gather(table, 0)[:vocab_size] for table in tables]
        embedding, lm_head = whole[0], whole[-1]
        return DraftRuntime(
            tables=TargetTables(embedding, lm_head),
            num_kv_slots=pool.size + pool.page_size,
            num_slots=num_slots,
            device=embedding.device,
            dtype=self._runner.dtype,
            prepare=pack_head if embedding.is_cpu else None,
        )

    def take_hidden(self, logits_output: Any) -> Float[Tensor, "T nD"] | None:
        """Take the hidden states out of a forward's output, where the engine would copy them."""
        hidden: Tensor | None = logits_output.hidden_states
        logits_output.hidden_states = None
        return hidden

    def read(
        self, hidden: Float[Tensor, "T nD"] | None, kv_slots: Int[Tensor, " T"]
    ) -> TargetFeatures:
        """Features of T tokens, whose hidden states come in the order of the layers."""
        needs = self._needs
        taps = keys = values = None
        if needs.target_layers:
            assert hidden is not None
            order = sorted(needs.target_layers)
            taps = hidden.unflatten(1, (len(order), -1))
            if order != list(needs.target_layers):
                taps = taps[:, [order.index(layer) for layer in needs.target_layers]]
        if needs.kv_layers:
            pool = self._runner.token_to_kv_pool
            pairs = [pool.get_kv_buffer(layer) for layer in needs.kv_layers]
            keys = self._gather(torch.stack([k[kv_slots] for k, _ in pairs], dim=1), 2)
            values = self._gather(torch.stack([v[kv_slots] for _, v in pairs], dim=1), 2)
        return TargetFeatures(hidden=taps, keys=keys, values=values)

    def prefilled(
        self,
        batch: Any,
        slots: list[int],
        hidden: Float[Tensor, "T nD"] | None,
        next_tokens: Int[Tensor, " B"],
    ) -> CommittedTokens:
        """The tokens of a prefill, chunked or behind a cached prefix.

        Args:
            next_tokens: what the forward has sampled, of use where a prompt has ended.
        """
        following, positions, owners, num_new = [], [], [], []
        for row, (req, prefix) in enumerate(zip(batch.reqs, batch.prefix_lens, strict=True)):
            tokens = list(req.get_fill_ids())
            full = list(req.full_untruncated_fill_ids)
            after = full[prefix + 1 : len(tokens) + 1]
            num_new.append(len(tokens) - prefix)
            following.append(torch.tensor([*after, -1][: num_new[-1]], dtype=torch.int64))
            positions.append(torch.arange(prefix, len(tokens)))
            owners.append(torch.full((num_new[-1],), row))
        device = next_tokens.device
        requests = torch.cat(owners).to(device)
        following_ids = torch.cat(following).to(device)
        following_ids = torch.where(following_ids < 0, next_tokens[requests], following_ids)
        kv_slots = batch.out_cache_loc.to(torch.int64)
        prefix_lens = torch.tensor(list(batch.prefix_lens), dtype=torch.int64, device=device)
        return CommittedTokens(
            features=self.read(None if hidden is None else hidden[: len(kv_slots)], kv_slots),
            next_tokens=following_ids,
            positions=torch.cat(positions).to(device),
            kv_slots=kv_slots,
            requests=requests,
            batch=draft_batch(batch, slots, next_tokens, prefix_lens, max(batch.prefix_lens)),
            max_new_tokens=max(num_new),
        )

    def verified(
        self,
        batch: DraftBatch,
        window: Int[Tensor, "B N"],
        hidden: Float[Tensor, "T nD"] | None,
        rows: Int[Tensor, "B N"],
        accepted: AcceptResult,
    ) -> CommittedTokens:
        """The accepted paths of a round, after their KV has moved to the window's front.

        Args:
            rows: of the nodes among the forward's.
        """
        kv_slots = window[:, : accepted.accept_index.shape[1]]
        path_rows = rows.gather(1, accepted.accept_index.clamp(min=0)).flatten()
        features = self.read(None if hidden is None else hidden[path_rows], kv_slots.flatten())
        return CommittedTokens.of_paths(batch, accepted, kv_slots, features)


def draft_batch(
    batch: Any,
    slots: list[int],
    bonus_tokens: Int[Tensor, " B"],
    seq_lens: Int[Tensor, " B"],
    max_seq_len: int,
) -> DraftBatch:
    """The requests of a batch as a drafter sees them; `max_seq_len` is known to the host."""
    rows = batch.req_pool_indices.to(torch.int64)
    return DraftBatch(
        slots=tuple(slots),
        bonus_tokens=bonus_tokens.to(torch.int64),
        seq_lens=seq_lens.to(torch.int64),
        kv_slots=batch.req_to_token_pool.req_to_token[rows, :max_seq_len].to(torch.int64),
    )
