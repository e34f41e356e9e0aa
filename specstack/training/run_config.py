"""What a training run is: the sections of its YAML file, frozen, checked, defaults filled in.

No torch. Shares are of the whole run unless said otherwise. Papers behind the options: block
training DFlash (arXiv 2602.06036), unrolling EAGLE-3 (2503.01840), remedies KVShot (2604.26412),
`lk` (2602.23881). What fits a target is checked in `run_head`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from specstack.models.heads.config import ConditioningConfig, ContextConfig
from specstack.models.heads.errors import sentences
from specstack_dsl.parts.target import Target as PipelineTarget

LossKind = Literal["forward_kl", "reverse_kl", "ce", "tv", "lk"]
Group = Literal["input", "layers", "kv", "corrector"]
Share = Annotated[float, Field(ge=0, le=1, strict=False)]
Positive = Annotated[float, Field(gt=0, strict=False)]
NotNegative = Annotated[float, Field(ge=0, strict=False)]
Count = Annotated[int, Field(ge=1)]


def _below_one(value: float) -> float:
    if value >= 1:
        raise ValueError(f"expected less than 1, found {value}")
    return value


BelowOne = Annotated[Share, AfterValidator(_below_one)]


class Section(BaseModel):
    """Options of one section of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class Target(Section):
    """The frozen model."""

    model: str = Field(
        description="Hugging Face id, local folder (./ or /), or packaged:NAME", min_length=1
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Type of its weights; auto: float32 on a CPU, else bfloat16"
    )
    attention: Literal["sdpa", "eager"] = Field(
        default="sdpa", description="Its attention in transformers"
    )

    @field_validator("model")
    @classmethod
    def _is_one_for_pipelines(cls, model: str) -> str:
        try:
            return PipelineTarget.model_validate({"model": model}).model
        except ValidationError as error:
            raise ValueError(sentences(error)[0]) from None


class Answers(Section):
    """What is learnt."""

    files: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        min_length=1, description="Files of `specstack draft regenerate`"
    )
    max_length: Annotated[int, Field(ge=8)] = Field(
        default=1024, description="Tokens of prompt and answer together; what is beyond is cut"
    )
    holdout_share: BelowOne = Field(
        default=0.02, description="Share of the prompts that is not trained on"
    )
    max_bad_share: Share = Field(
        default=0.01, description="Broken lines are skipped up to this share"
    )


class Head(Section):
    """The head, as in its `config.json`; the target's sizes are added."""

    form: Literal["block", "autoregressive"] = Field(description="One pass, or one per draft")
    num_layers: Count = Field(default=1, description="Draft layers")
    block_size: Annotated[int, Field(ge=2)] = Field(
        default=8,
        description="Block: slots, anchor included; autoregressive: depth of the unrolling",
    )
    mask: Literal["bidirectional", "tree_causal"] = Field(
        default="tree_causal", description="What the slots of a block see of each other"
    )
    slots: Literal["masked", "seeded"] = Field(
        default="masked",
        description="Block: slots start from a MASK alone (masked), or from the last features too",
    )
    context: Annotated[ContextConfig, Field(strict=False)] = Field(
        description="Where knowledge of the prefix comes from"
    )
    conditioning: Annotated[ConditioningConfig, Field(strict=False)] = Field(
        default=ConditioningConfig(), description="What makes slots depend on the path before them"
    )
    draft_vocab_size: Count | None = Field(
        default=None,
        description="Most frequent answer tokens that can be drafted; null: all tokens",
    )
    extra_norms: bool = Field(
        default=False, description="Normalise the hidden state that is fed back"
    )
    intermediate_size: Count | None = Field(
        default=None, description="Of the MLPs; null: the target's"
    )


class Start(Section):
    """What the head is before the first step."""

    head: str | None = Field(
        default=None,
        description="Folder of a head to go on from, vocabulary included; replaces the others",
    )
    from_target: bool = Field(default=True, description="Copy layers and norms of the target")
    layers: Annotated[tuple[int, ...], Field(strict=False)] | None = Field(
        default=None,
        description="One target layer per draft layer; null: the paired or the last ones",
    )


class Optimiser(Section):
    """AdamW with warm-up and cosine."""

    lr: Positive = Field(default=6e-4, description="Largest learning rate")
    min_lr_share: Share = Field(default=0.05, description="Of `lr`, at the end")
    warmup_share: Share = Field(default=0.04, description="Of the steps, with a rising rate")
    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="Of AdamW"
    )
    weight_decay: NotNegative = Field(default=0.0, description="Of AdamW, for matrices only")
    clip: Positive = Field(default=1.0, description="Largest norm of the gradient")
    batch_size: Count = Field(default=8, description="Sequences per forward, over all processes")
    accumulation: Count = Field(default=1, description="Forwards per step")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of the head's matrix products; its weights stay float32"
    )


class Anchors(Section):
    """Where drafts begin."""

    per_sequence: Count | None = Field(
        default=16, description="Random answer positions drafted from, per sequence; null: all"
    )
    refresh_share: Share = Field(
        default=0.5, description="conditioning refresh: blocks that carry real tokens"
    )


class Auxiliary(Section):
    """Weights of further losses."""

    forward_kl: NotNegative = Field(default=0.0, description="Its weight")
    reverse_kl: NotNegative = Field(default=0.0, description="Its weight")
    ce: NotNegative = Field(default=0.0, description="Its weight")
    tv: NotNegative = Field(default=0.0, description="Its weight")


class Loss(Section):
    """What is minimised."""

    kind: LossKind = Field(default="forward_kl", description="Between target p and draft q")
    temperature: Positive = Field(default=1.0, description="Of both distributions")
    gamma: Positive | None = Field(
        default=4.0, description="Depth k weighs exp(-(k - 1) / gamma); null: all the same"
    )
    eta: Positive = Field(default=3.0, description="lk: lambda = exp(-eta * acceptance)")
    auxiliary: Auxiliary = Field(default=Auxiliary(), description="Further losses")
    chunk_rows: Count = Field(
        default=64,
        description="Distributions in memory at once: few for a CPU's cache, many for a GPU",
    )


class Stage(Section):
    """A part of the run in which some weights do not move."""

    until: Share = Field(description="Share of the steps at which it ends")
    freeze: Annotated[tuple[Group, ...], Field(strict=False)] = Field(
        description="Groups of weights: input, layers, kv, corrector"
    )


class Schedule(Section):
    """How long."""

    epochs: Positive = Field(default=1.0, description="Passes over the answers")
    max_steps: Count | None = Field(default=None, description="Steps; replaces epochs")
    stages: Annotated[tuple[Stage, ...], Field(strict=False)] = Field(
        default=(), description="Stages with frozen weights, in order; afterwards nothing is frozen"
    )

    @field_validator("stages")
    @classmethod
    def _rise(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        ends = [stage.until for stage in stages]
        if ends != sorted(set(ends)):
            raise ValueError(f"until must rise from stage to stage, found {ends}")
        return stages


class Remedies(Section):
    """Against starved gates and sparse gradients of target KV; all off by default."""

    gate_floor: BelowOne = Field(default=0.0, description="Least gate at the start, falling to 0")
    branch_dropout: BelowOne = Field(
        default=0.0, description="Share of the sequences that lose one branch of gated_delta"
    )
    kv_only_weight: NotNegative = Field(
        default=0.0,
        description="Weight at the start of the loss on the KV branch alone, falling to 0",
    )
    prefix_mix: BelowOne = Field(
        default=0.0,
        description="Share of the prefix whose KV is the head's own instead of the target's",
    )
    anneal_share: Annotated[Share, Field(gt=0)] = Field(
        default=0.5, description="Share of the steps at which what falls has reached 0"
    )


class Features(Section):
    """Where the target's features come from."""

    source: Literal["on_the_fly", "cache"] = Field(
        default="on_the_fly", description="Computed for every batch, or once and kept on disk"
    )
    folder: str | None = Field(default=None, description="Of the cache")
    max_gb: Positive = Field(default=20.0, description="Largest cache")

    @model_validator(mode="after")
    def _folder_if_cached(self) -> Features:
        if (self.source == "cache") != (self.folder is not None):
            raise ValueError("source cache needs a folder, source on_the_fly takes none")
        return self


class Logging(Section):
    """What is watched."""

    every: Count = Field(default=1, description="Steps per line")
    evaluate_every: Count = Field(default=200, description="Steps between looks at the holdout")
    holdout_sequences: Count = Field(default=64, description="Most sequences looked at")


class Checkpoints(Section):
    """What is kept."""

    every: Count = Field(default=200, description="Steps between checkpoints")
    keep: Count = Field(default=2, description="Latest ones that are kept")
    head_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of the weights in head/, at the end"
    )


class Run(BaseModel):
    """One training run as it was written, defaults filled in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = Field(description="Of this format: 1")
    target: Target = Field(description="The frozen model")
    answers: Answers = Field(description="What is learnt")
    head: Head = Field(description="What is trained")
    start: Start = Start()
    optimiser: Optimiser = Optimiser()
    anchors: Anchors = Anchors()
    loss: Loss = Loss()
    schedule: Schedule = Schedule()
    remedies: Remedies = Remedies()
    features: Features = Features()
    logging: Logging = Logging()
    checkpoints: Checkpoints = Checkpoints()
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda if there is one"
    )
    seed: int = Field(default=0, ge=0, description="Of the order, the anchors and the start")

    @property
    def depth(self) -> int:
        """Drafts per anchor, K."""
        head = self.head
        return head.block_size - 1 if head.form == "block" else head.block_size
