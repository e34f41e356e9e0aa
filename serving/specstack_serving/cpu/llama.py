"""The layers of a Llama model in a straight line, without SGLang's layer boundaries.

A boundary decides, for every layer of every step, which collective or fused kernel completes a
sum. On a single CPU rank nothing is ever owed, and finding that out costs more than the norms. The
arithmetic is that of SGLang's layers, operation for operation: results are equal bit by bit.

Letters: T tokens, D hidden size, Q and K widths of all query and all key heads.
"""

from __future__ import annotations

import logging
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu.linear import PackedLinearMethod
from specstack_serving.cpu.ops import Rotation, is_plain_norm, is_plain_rope, rope_classes, rotation

logger = logging.getLogger(__name__)


def straighten(model: nn.Module) -> bool:
    """Give `model` a straight forward where it is a Llama model on one rank, packed throughout."""
    body: Any = getattr(model, "model", None)
    parallel = sgl.get_parallel()
    if type(body) is not sgl.LlamaModel or parallel.tp_size * parallel.pp_size > 1:
        return False
    layers = list(body.layers)
    if not all(map(_is_straight, layers)) or not is_plain_norm(body.norm):
        return False
    body.forward = StraightModel(body)
    logger.info("%d layers run without layer boundaries", len(layers))
    return True


def _is_straight(layer: Any) -> bool:
    if type(layer) is not sgl.LlamaDecoderLayer:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        all(type(linear.quant_method) is PackedLinearMethod for linear in linears)
        and all(map(is_plain_norm, norms))
        and type(attention.rotary_emb) in rope_classes()
        and is_plain_rope(attention.rotary_emb)
    )


class StraightModel:
    """Replaces `LlamaModel.forward`."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._layers = [StraightLayer(layer) for layer in body.layers]
        self._rope = body.layers[0].self_attn.rotary_emb

    def __call__(
        self,
        input_ids: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        forward_batch: Any,
        input_embeds: Float[Tensor, "T D"] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """The normed hidden states, with the captured layers' inputs where some are wanted."""
        body = self._body
        stream = body.embed_tokens(input_ids) if input_embeds is None else input_embeds
        turn = rotation(self._rope, positions)
        captured = []
        for index, layer in enumerate(self._layers):
            if index in body.layers_to_capture:
                captured.append(stream)
            stream = layer(stream, turn, forward_batch)
        hidden = _norm(body.norm, stream)
        return (hidden, captured) if captured else hidden


class StraightLayer:
    """One decoder layer over the modules of a `LlamaDecoderLayer`."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._input_norm, self._post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._qkv, self._out = _linear(attention.qkv_proj), _linear(attention.o_proj)
        self._gate_up, self._down = _linear(mlp.gate_up_proj), _linear(mlp.down_proj)
        self._attend = attention.attn
        self._queries, self._keys = attention.q_size, attention.q_size + attention.kv_size

    def __call__(
        self, stream: Float[Tensor, "T D"], turn: Rotation, forward_batch: Any
    ) -> Float[Tensor, "T D"]:
        """Layer input to layer output; `stream` itself is left as it is."""
        qkv = self._qkv(_norm(self._input_norm, stream))
        rotated = turn(qkv[:, : self._keys])
        attended = self._attend.forward(
            rotated[:, : self._queries],
            rotated[:, self._queries :],
            qkv[:, self._keys :],
            forward_batch,
        )
        stream = self._out(attended).add_(stream)
        gate, up = self._gate_up(_norm(self._post_norm, stream)).chunk(2, dim=1)
        return self._down(silu(gate).mul_(up)).add_(stream)


def _norm(norm: Any, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
    return rms_norm(x, (norm.hidden_size,), norm.weight, norm.variance_epsilon)


def _linear(layer: Any) -> Any:
    """`layer` on its own: matrix and bias, without what only several ranks need."""
    packed, bias = layer.quant_method.packed, layer.bias
    return packed if bias is None else lambda x: packed(x, bias)
