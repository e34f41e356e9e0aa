"""Attention backend `specstack_cpu`: SGLang's interface around `attention`.

Serves decode, prefill and speculative verification under a tree mask of multi-head models with
full causal attention in the pool's own precision, and refuses everything else at start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu.attention import (
    Bucket,
    Extension,
    LowerRightMask,
    attend_extend,
    attend_window,
    plan_extend,
    plan_window,
)


class CpuAttentionBackend(sgl.AttentionBackend):  # type: ignore[misc]
    """One instance per model runner; the plan of the running forward is its only state."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        problems = unsupported_layers(model_runner)
        if problems:
            raise ValueError(
                "attention backend specstack_cpu cannot run this model: " + "; ".join(problems)
            )
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._causal_mask = LowerRightMask()
        self._buckets: list[Bucket] = []
        self._extensions: list[Extension] = []
        self._num_window = 1
        self._computed: Tensor | None = None
        self._rows = torch.zeros(0, dtype=torch.int64)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the forward once for all layers."""
        mode = forward_batch.forward_mode
        table = self.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices
        if mode.is_idle():
            return
        if mode.is_decode():
            # Here, unlike in verification, seq_lens counts the token being decoded.
            self._num_window, self._computed = 1, None
            self._buckets = plan_window(
                table, rows, forward_batch.seq_lens - 1, None, [1] * len(rows)
            )
        elif mode.is_target_verify():
            self._plan_verify(forward_batch)
        else:
            self._extensions = plan_extend(
                table, rows, forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
            )

    def _plan_verify(self, forward_batch: Any) -> None:
        spec_info, size = forward_batch.spec_info, forward_batch.batch_size
        num_window = spec_info.draft_token_num
        tree_mask = spec_info.custom_mask
        if tree_mask is not None:
            if tree_mask.numel() != size * num_window * num_window:
                raise ValueError(
                    f"the tree mask has {tree_mask.numel()} entries, but {size} requests of "
                    f"{num_window} nodes need {size * num_window**2}: specstack_cpu takes the "
                    "window only, without the prefix"
                )
            tree_mask = tree_mask.view(size, num_window, num_window).bool()
        self._num_window = num_window
        self._computed = getattr(spec_info, "computed_nodes", None)
        num_nodes = [num_window] * size
        if self._computed is not None:
            self._rows = spec_info.node_rows
            owners = self._computed.div(num_window, rounding_mode="floor")
            num_nodes = torch.bincount(owners, minlength=size).tolist()
        self._buckets = plan_window(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            tree_mask,
            num_nodes,
        )

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """One token per request."""
        self._save(layer, forward_batch, k, v, save_kv_cache)
        return self._attend_window(q, layer)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Prefill, chunked or behind a cached prefix, or the window of a verification."""
        self._save(layer, forward_batch, k, v, save_kv_cache)
        if forward_batch.forward_mode.is_target_verify():
            return self._attend_window(q, layer)
        heads, dim = layer.tp_k_head_num, layer.head_dim
        out = attend_extend(
            self._extensions,
            q.view(-1, heads, layer.tp_q_head_num // heads, dim),
            k.view(-1, heads, dim),
            v.view(-1, heads, dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            layer.scaling,
            self._causal_mask,
        )
        return out.view(q.shape)

    def _save(self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor, save: bool) -> None:
        if save and k is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, sgl.KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )

    def _attend_window(self, q: Tensor, layer: Any) -> Tensor:
        heads, computed = layer.tp_k_head_num, self._computed
        # Dead nodes have no row: they attend with their root's, and the result is dropped.
        queries = q if computed is None else embedding(self._rows, q)
        out = attend_window(
            self._buckets,
            queries.view(-1, self._num_window, heads, layer.tp_q_head_num // heads, layer.head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            layer.scaling,
        )
        out = out.reshape(queries.shape[0], -1)
        return out if computed is None else embedding(computed, out)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of an empty request in a padded batch."""
        return 1

    def support_triton(self) -> bool:
        """No: SGLang then computes positions in torch."""
        return False


def unsupported_layers(model_runner: Any) -> list[str]:
    """What this model asks of attention that the backend does not do."""
    problems = []
    if model_runner.kv_cache_dtype != model_runner.dtype:
        problems.append(
            f"the KV cache is {model_runner.kv_cache_dtype}, the model {model_runner.dtype} "
            "(use --kv-cache-dtype auto)"
        )
    for name, layer in model_runner.model.named_modules():
        if not isinstance(layer, sgl.RadixAttention):
            continue
        if layer.attn_type != sgl.AttentionType.DECODER or layer.is_cross_attention:
            problems.append(f"{name} is not causal self-attention")
        if layer.sliding_window_size > -1:
            problems.append(f"{name} has a sliding window of {layer.sliding_window_size}")
        if layer.logit_cap:
            problems.append(f"{name} caps its logits at {layer.logit_cap}")
        if layer.qk_head_dim != layer.v_head_dim:
            problems.append(f"{name} has keys of {layer.qk_head_dim}, values of {layer.v_head_dim}")
    return problems
