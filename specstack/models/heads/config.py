"""What a draft head is: the contents of its checkpoint's `config.json`. No torch.

Rules that join several fields are sentences of `_context_problems` and `_head_problems`; all that
are broken are reported at once. Fields, choices and their papers: see `block` (DFlash, JetFlow),
`autoregressive` (EAGLE-3, MTP), `sources` (KVShot) and `conditioning` (DSpark, Domino).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from specstack.hf_config import read_config
from specstack.models.heads.errors import HeadError, sentences

LayerId = Annotated[int, Field(ge=0)]
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Frequencies that do not depend on the length of the sequence."""
_QK_NORM_MODELS = ("qwen3", "qwen3_moe")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetShape(_Frozen):
    """The sizes of the target that a head was made for; its layers have the same geometry."""

    name: str
    hidden_size: PositiveInt
    num_layers: PositiveInt
    vocab_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    rms_norm_eps: PositiveFloat
    max_position_embeddings: PositiveInt
    rope: dict[str, Any]
    """As `rope_parameters` of transformers: rope_type, rope_theta and the type's own values."""
    qk_norm: bool
    """Queries and keys are RMS-normalised per head before RoPE (Qwen3)."""
    fingerprint: str | None = None
    """`TargetTables.fingerprint()` of the target that the head was trained with."""

    @model_validator(mode="after")
    def _check(self) -> TargetShape:
        _raise_all(_target_problems(self))
        return self

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, name: str, fingerprint: str | None = None
    ) -> TargetShape:
        """Read an HF `config.json`; raises HeadError where a head cannot share the geometry."""
        if config.get("hidden_act", "silu") != "silu":
            raise HeadError(
                f"{name} has hidden_act {config['hidden_act']!r}: draft layers have silu only"
            )
        names = ("hidden_size", "num_layers", "vocab_size", "num_heads", "num_kv_heads")
        try:
            facts = read_config(config)
            return cls(
                name=name,
                **{field: facts[field] for field in names},
                head_dim=facts["head_dim"],
                rms_norm_eps=config["rms_norm_eps"],
                max_position_embeddings=facts["max_position_embeddings"],
                rope=_rope(config),
                qk_norm=config.get("model_type") in _QK_NORM_MODELS,
                fingerprint=fingerprint,
            )
        except KeyError as error:
            raise HeadError(f"the config of {name} has no {error.args[0]}") from None
        except ValidationError as error:
            raise HeadError(f"{name} cannot have a head: {'; '.join(sentences(error))}") from None


class ContextConfig(_Frozen):
    """Where the head's knowledge of the prefix comes from."""

    source: Literal["hidden", "kv", "hybrid"]
    target_layers: tuple[LayerId, ...] = ()
    """Tapped hidden states: 0-based outputs of these layers."""
    kv_layers: tuple[LayerId, ...] = ()
    """Tapped keys and values."""
    kv_mix: Literal["linear", "linear_derotated", "paired"] | None = None
    """`linear`: KVShot's mix of rotated keys, rotated again. `linear_derotated`: rotated back
    first, so that the mix keeps relative positions. `paired`: draft layer i reads kv_layers[i]."""
    fusion: Literal["none", "gated_delta", "sum"] = "none"
    sum_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the maps A_i, B_i of `sum`; 0 makes them diagonal."""


class ConditioningConfig(_Frozen):
    """What makes the logits of a block's slot depend on the tokens of the path before it."""

    kind: Literal["none", "markov", "gru", "refresh"] = "none"
    rank: Annotated[int, Field(ge=0)] = 0
    parent: Literal["embedding", "table"] = "embedding"
    """A parent enters through the target's embedding, projected, or through a V x rank table."""
    output: Literal["hidden", "logits"] = "hidden"
    """The correction is added before the lm_head (rank -> D) or to the logits (rank -> W)."""


class HeadConfig(_Frozen):
    """A draft head."""

    mask_token_id: ClassVar[int] = -1
    """Stands in `tokens` for a slot whose token is not known."""

    model_type: Literal["specstack_head"] = "specstack_head"
    form: Literal["block", "autoregressive"]
    num_layers: PositiveInt
    block_size: Annotated[int, Field(ge=2)]
    """Block form: drafts and the anchor. Autoregressive form: the largest depth trained."""
    mask: Literal["bidirectional", "tree_causal"] = "tree_causal"
    slots: Literal["masked", "seeded"] = "masked"
    """Block form: what a slot starts from, see `block`."""
    context: ContextConfig
    conditioning: ConditioningConfig = ConditioningConfig()
    draft_vocab_size: PositiveInt | None = None
    """None drafts every token of the target."""
    extra_norms: bool = False
    """The hidden state that is fed back is RMS-normalised first (Attention Drift)."""
    intermediate_size: PositiveInt
    target: TargetShape

    @property
    def num_slots(self) -> int:
        """Slots of a block; where the anchor's own slot drafts, the last depth needs none."""
        return self.block_size - (self.slots == "seeded")

    @model_validator(mode="after")
    def _check(self) -> HeadConfig:
        _raise_all([*_context_problems(self), *_head_problems(self)])
        return self


def _raise_all(problems: Iterable[str]) -> None:
    if found := list(problems):
        raise ValueError("; ".join(found))


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Bring both spellings of transformers (4: rope_theta, rope_scaling; 5) to the newer one."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    rope.pop("type", None)
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return rope


def _target_problems(target: TargetShape) -> Iterator[str]:
    if target.num_heads % target.num_kv_heads:
        yield f"num_heads {target.num_heads} is no multiple of num_kv_heads {target.num_kv_heads}"
    if target.head_dim % 2:
        yield f"head_dim {target.head_dim} is odd: RoPE rotates pairs"
    if (kind := target.rope.get("rope_type")) not in ROPE_TYPES:
        yield f"rope_type {kind!r} is not supported; choose from {', '.join(ROPE_TYPES)}"
    if target.rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor must be 1.0: heads rotate whole head vectors"
    if "rope_theta" not in target.rope:
        yield "rope has no rope_theta"


def _context_problems(config: HeadConfig) -> Iterator[str]:
    context, form = config.context, config.form
    uses_hidden, uses_kv = context.source != "kv", context.source != "hidden"
    if uses_hidden and not context.target_layers:
        yield f"context.source {context.source} needs context.target_layers"
    if not uses_hidden and context.target_layers:
        yield "context.source kv takes no context.target_layers: it reads no hidden states"
    if uses_kv and not (context.kv_layers and context.kv_mix):
        yield f"context.source {context.source} needs context.kv_layers and context.kv_mix"
    if not uses_kv and (context.kv_layers or context.kv_mix):
        yield "context.source hidden takes no context.kv_layers and no context.kv_mix"
    if context.kv_mix == "paired" and len(context.kv_layers) != config.num_layers:
        yield (
            f"context.kv_mix paired needs one of context.kv_layers per draft layer: "
            f"{len(context.kv_layers)} for {config.num_layers} layers"
        )
    wanted = "none"
    if context.source == "hybrid":
        wanted = "sum" if form == "block" else "gated_delta"
    if context.fusion != wanted:
        yield f"context.source {context.source} of the {form} form needs context.fusion {wanted}"
    if context.fusion == "sum" and context.kv_mix not in ("paired", None):
        yield "context.fusion sum needs context.kv_mix paired: A_i maps one target layer"
    if context.sum_rank and context.fusion != "sum":
        yield "context.sum_rank belongs to context.fusion sum"
    for field in ("target_layers", "kv_layers"):
        layers: tuple[int, ...] = getattr(context, field)
        beyond = [layer for layer in layers if layer >= config.target.num_layers]
        if beyond:
            yield (
                f"context.{field} names layer {beyond[0]}, {config.target.name} has layers 0 to "
                f"{config.target.num_layers - 1}"
            )


def _head_problems(config: HeadConfig) -> Iterator[str]:
    conditioning = config.conditioning
    if config.mask == "bidirectional" and config.form != "block":
        yield "mask bidirectional needs form block"
    if config.form != "block" and conditioning.kind != "none":
        yield (
            f"conditioning.kind {conditioning.kind} needs form block: "
            "an autoregressive head reads the path itself"
        )
    corrects = conditioning.kind in ("markov", "gru")
    if corrects != (conditioning.rank > 0):
        verb = "needs a" if corrects else "takes no"
        yield f"conditioning.kind {conditioning.kind} {verb} conditioning.rank"
    if conditioning.kind == "refresh" and config.mask != "tree_causal":
        yield "conditioning.kind refresh needs mask tree_causal"
    if config.slots == "seeded":
        if config.form != "block":
            yield "slots seeded needs form block: an autoregressive head always starts like this"
        if config.context.source == "kv":
            yield "slots seeded needs hidden states, which context.source kv does not read"
        if conditioning.kind == "refresh":
            yield "conditioning.kind refresh needs slots masked: it asks behind every node"
    if config.extra_norms and config.form == "block":
        yield "extra_norms needs form autoregressive: a block feeds no hidden state back"
    if config.draft_vocab_size and config.draft_vocab_size > config.target.vocab_size:
        yield (
            f"draft_vocab_size {config.draft_vocab_size} exceeds the {config.target.vocab_size} "
            f"tokens of {config.target.name}"
        )
