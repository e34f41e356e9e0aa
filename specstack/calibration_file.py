"""The file that `specstack draft calibrate` writes and a tree's `calibration` names. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specstack.models.heads.errors import sentences
from specstack_dsl import Pipeline, PlanError, Problem

Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
MODEL_TYPE = "specstack_calibration"
TABLES = ("log_factor", "reached", "right", "sum_q")


class HeldOut(BaseModel):
    """What factors of one half of the prompts do for drafts of the other half."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fitted_drafts: Count
    drafts: Count
    log_loss_before: Number
    """Per draft: the mean of -log of the probability that was given to what happened."""
    log_loss_after: Number


class CalibrationFile(BaseModel):
    """What was measured, and of what.

    Tables are [depths][ranks][2]: parent off the spine, and on it. Of every draft whose parent was
    right; the last depth and the last rank stand for all beyond.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: Literal["specstack_calibration"] = "specstack_calibration"
    log_factor: list[list[tuple[Number, Number]]]
    """Added to log q."""
    reached: list[list[tuple[Count, Count]]]
    """Drafts."""
    right: list[list[tuple[Count, Count]]]
    """Those that were right."""
    sum_q: list[list[tuple[Number, Number]]]
    """What the drafter said: the sum of q, given the parent."""
    held_out: HeldOut | None
    """None where there was one prompt."""
    provenance: dict[str, Any]

    @model_validator(mode="after")
    def _tables_have_one_shape(self) -> Self:
        ranks = {name: [len(depth) for depth in getattr(self, name)] for name in TABLES}
        expected = ranks["log_factor"]
        if min(expected, default=0) < 1 or len(set(expected)) > 1:
            raise ValueError(
                "log_factor: expected the same number of ranks at every depth, one at least, found"
                f" {expected}"
            )
        for name, found in ranks.items():
            if found != expected:
                raise ValueError(
                    f"{name}: expected {expected} ranks as log_factor has, found {found}"
                )
        return self

    def as_text(self) -> str:
        """JSON, a depth of a table per line."""
        items = []
        for name, value in self.model_dump(mode="json").items():
            text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
            if name in TABLES:
                text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n]"
            items.append(f'"{name}": {text}'.replace("\n", "\n  "))
        return "{\n  " + ",\n  ".join(items) + "\n}\n"


def planned_calibration(pipeline: Pipeline) -> dict[str, Any] | None:
    """The numbers of the file that the tree names; raises PlanError for what is no such file."""
    stated = getattr(pipeline.tree, "calibration", None)
    if stated is None:
        return None
    position = pipeline.position("tree.calibration")
    try:
        found = _read(position.resolve(stated))
    except _NoCalibration as error:
        raise PlanError([Problem("tree.calibration", str(error), position, "plan")]) from None
    return {"log_factor": found.model_dump(mode="json")["log_factor"]}


class _NoCalibration(Exception):
    """A sentence."""


def _read(file: Path) -> CalibrationFile:
    try:
        text = json.loads(file.read_bytes())
    except OSError as error:
        raise _NoCalibration(
            f"cannot read {file}: {error.strerror}; `specstack draft calibrate` writes one"
        ) from None
    except ValueError as error:
        raise _NoCalibration(f"{file} is not JSON: {error}") from None
    kind = text.get("model_type") if isinstance(text, dict) else None
    if kind != MODEL_TYPE:
        raise _NoCalibration(f"{file} has model_type {kind!r}; a calibration has {MODEL_TYPE!r}")
    try:
        return CalibrationFile.model_validate(text)
    except ValidationError as error:
        raise _NoCalibration(
            f"{file} is not a calibration: {'; '.join(sentences(error))}"
        ) from None
