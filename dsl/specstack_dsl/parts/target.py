"""The model whose output is served."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from specstack_dsl.parts.base import Section

PACKAGED_PREFIX = "packaged:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def is_folder(model: str) -> bool:
    """Whether `model` names a local folder: it begins with `.`, `/` or `~`."""
    return model.startswith((".", "/", "~"))


def model_name(model: str) -> str:
    """Check the form of a name; raises ValueError."""
    name = model.removeprefix(PACKAGED_PREFIX)
    if is_folder(model) or _HUB_ID.fullmatch(name):
        return model
    raise ValueError(
        f"{model!r} is not a model: give a Hugging Face id (org/name), a folder that begins"
        f" with ./ or /, or {PACKAGED_PREFIX}NAME"
    )


class Target(Section):
    """Options of the target."""

    section = "target"
    summary: ClassVar[str] = "The model whose output is served; speculation never changes it."
    provides = frozenset({"tokens", "logits", "target_features"})

    model: Annotated[str, AfterValidator(model_name)] = Field(
        description="Hugging Face id, local folder (./ or /), or packaged:NAME"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and activations; auto: float32 on a CPU, else the model's",
    )
