"""Text of a training run to `Run`: read as pipelines are, every problem at its place. No torch.

Files, `extends:`, `${VAR}` and `--set` are those of pipelines (`specstack_dsl.source`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from specstack.training.run_config import Run
from specstack_dsl import SpecError
from specstack_dsl.errors import Position, Problem, in_file_order
from specstack_dsl.messages import message, nearest
from specstack_dsl.source import Document, read


@dataclass(frozen=True)
class RunFile:
    """A run, and where its values were written."""

    run: Run
    positions: Mapping[str, Position]

    def problem(self, path: str, message: str) -> SpecError:
        """The error that the value at `path` cannot be used."""
        return SpecError([Problem(path, message, nearest(path, self.positions), "run")])

    def resolve(self, path: str, name: str) -> Path:
        """The file or folder that `name`, written at `path`, means."""
        return nearest(path, self.positions).resolve(name)


def load_run(file: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read and check a run; raises SpecError with every problem."""
    document = read(file, overrides)
    positions = {path: node.position for path, node in document.root.walk()}
    try:
        run = Run.model_validate(document.root.plain)
    except ValidationError as error:
        raise SpecError(in_file_order(_problems(error, document), document.files)) from None
    broken = [Problem(path, text, nearest(path, positions), "run") for path, text in _rules(run)]
    if broken:
        raise SpecError(in_file_order(broken, document.files))
    return RunFile(run, positions)


def _problems(error: ValidationError, document: Document) -> Iterator[Problem]:
    nodes = dict(document.root.walk())
    positions = {path: node.position for path, node in nodes.items()}
    keys = {path: node.key_position or node.position for path, node in nodes.items()}
    for item in error.errors(include_url=False):
        if item["type"] == "too_short" and item["input"]:
            continue  # pydantic counts sound items only; the unsound ones are reported themselves
        path = ".".join(map(str, item["loc"]))
        owner, known = _options(item["loc"][:-1])
        place = nearest(path, keys if item["type"] == "extra_forbidden" else positions)
        yield Problem(path, message(item, known, owner, {}), place, "types")


def _options(location: tuple[Any, ...]) -> tuple[str, dict[str, str]]:
    """Name the innermost mapping that a location lies in, and describe its options."""
    model: type[BaseModel] = Run
    name = "a run"
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model, name = _model_in(model.model_fields[part].annotation) or model, part
    return name, {key: field.description or "" for key, field in model.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, alone, in a list or where there may be none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner))), None)


def _rules(run: Run) -> Iterator[tuple[str, str]]:
    """What sections must agree on: (path, sentence)."""
    context, remedies = run.head.context, run.remedies
    for name in ("gate_floor", "branch_dropout", "kv_only_weight"):
        if getattr(remedies, name) and context.fusion != "gated_delta":
            yield f"remedies.{name}", "needs head.context.fusion gated_delta: others have no gate"
    if remedies.prefix_mix and (run.head.form != "autoregressive" or context.source == "hidden"):
        yield (
            "remedies.prefix_mix",
            "needs an autoregressive head that reads the target's KV (source kv or hybrid)",
        )
    if run.start.layers is not None and not run.start.from_target:
        yield "start.layers", "needs start.from_target: nothing is copied otherwise"
    if run.start.layers is not None and run.start.head is not None:
        yield "start.layers", "start.head goes on from a whole head: nothing is copied"
    has = {"kv": context.source != "hidden", "corrector": run.head.conditioning.rank > 0}
    for i, stage in enumerate(run.schedule.stages):
        for j, group in enumerate(stage.freeze):
            if not has.get(group, True):
                yield f"schedule.stages.{i}.freeze.{j}", f"the head has no weights of group {group}"
