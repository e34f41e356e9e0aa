"""The head of a run: its config on the target's sizes, its vocabulary, its start. Torch inside."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from specstack.models.heads.checkpoint import Head, load_head, make_head
from specstack.models.heads.config import HeadConfig, TargetShape
from specstack.models.heads.errors import sentences
from specstack.models.heads.initialise import initialise_from_target
from specstack.models.heads.vocabulary import DraftVocabulary
from specstack.training.run_config import Group
from specstack.training.run_file import RunFile
from specstack.training.target_model import FrozenTarget

_GROUPS: dict[Group, tuple[str, ...]] = {
    "kv": ("target_kv.", "kv_sum.", ".cross_attn.", ".delta."),
    "input": ("fusion.", "input_proj.", "embedding_norm.", "start_hidden", "mask_embedding"),
    "corrector": ("corrector.",),
}


def head_config(file: RunFile, shape: TargetShape, target_config: dict[str, Any]) -> HeadConfig:
    """The contents of the head's `config.json`; raises SpecError where it does not fit."""
    fields = file.run.head.model_dump()
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = target_config["intermediate_size"]
    try:
        return HeadConfig(**fields, target=shape)
    except ValidationError as error:
        raise file.problem("head", "; ".join(sentences(error))) from None


def new_head(
    file: RunFile, config: HeadConfig, target: FrozenTarget, counts: Tensor, sample: Tensor
) -> Head:
    """A head before its first step, float32.

    Args:
        counts: how often each token stands in an answer.
        sample: a few texts, [B, L], to measure the target on.
    """
    start = file.run.start
    if start.head is not None:
        return _earlier_head(file, start.head, config, target)
    vocabulary = None
    if config.draft_vocab_size is not None:
        vocabulary = DraftVocabulary.from_counts(counts.to(sample.device), config.draft_vocab_size)
    torch.manual_seed(file.run.seed)
    head = make_head(config, target.tables.to(dtype=torch.float32), vocabulary)
    if start.from_target:
        first = start.layers[0] if start.layers else config.target.num_layers - config.num_layers
        scale = 1.0
        if config.form == "autoregressive" or config.slots == "seeded":
            scale = target.stream_rms(sample, first)
        initialise_from_target(head, target.model, start.layers, input_scale=scale)
    return head


def _earlier_head(file: RunFile, name: str, config: HeadConfig, target: FrozenTarget) -> Head:
    """The head that the run goes on from; raises HeadError, or SpecError if it is another."""
    folder = file.resolve("start.head", name)
    head = load_head(folder, target.tables.to(dtype=torch.float32))
    # Whether it is of this target is checked by its fingerprint; the name is how a run calls it.
    wanted = config.model_dump(exclude={"target"})
    found = head.config.model_dump(exclude={"target"})
    differ = [
        f"{key} {found[key]}, not {wanted[key]}" for key in wanted if found[key] != wanted[key]
    ]
    if differ:
        words = f"{folder} holds another head than the run's: {'; '.join(differ)}"
        raise file.problem("start.head", words)
    return head


def group_of(name: str) -> Group:
    """The group that a weight of a head belongs to, by its name."""
    for group, parts in _GROUPS.items():
        if any(part in name if part.startswith(".") else name.startswith(part) for part in parts):
            return group
    return "layers"
