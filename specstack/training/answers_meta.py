"""The file beside a file of answers: the settings that made them, and every run that added some.

`answers.jsonl` has `answers.meta.json`. A run may add to answers only if its settings are the
recorded ones; which server gave them is recorded per run and may change.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specstack.training.answers import BadAnswers

FORMAT = 1


class SettingsDiffer(BadAnswers):
    """Answers were made with other settings; the text names both sides."""


@dataclass(frozen=True)
class Settings:
    """What decides the answers."""

    model: str | None
    """As the server calls it; None: not known yet."""
    prompts_sha256: str
    """Of the file of prompts."""
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    """A request's seed is this plus the line of its prompt."""
    token_ids: bool
    """Whether token ids were asked for."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request."""

    def request(self, line: int) -> dict[str, Any]:
        """The body of the request for the prompt at `line`, its messages aside."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            **self.extra_body,
        }
        if self.seed is not None:
            body["seed"] = self.seed + line
        if self.token_ids:
            body["return_token_ids"] = True
        return body


@dataclass(frozen=True)
class Meta:
    """The contents of the file."""

    settings: Settings
    prompts: str
    """Name of the file of prompts, for the reader; its hash is in the settings."""
    runs: tuple[dict[str, Any], ...]
    """Per run: `started` (ISO 8601), `specstack` (version), `server` (what it said of itself)."""


def meta_path(answers: Path) -> Path:
    """Where the settings of the file `answers` are."""
    return answers.with_suffix(".meta.json")


def read_meta(answers: Path) -> Meta | None:
    """Read the settings behind `answers`; None if there is no such file.

    Raises:
        BadAnswers: the file has another form.
    """
    path = meta_path(answers)
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, this version reads {FORMAT}")
        return Meta(Settings(**data["settings"]), data["prompts"], tuple(data["runs"]))
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise BadAnswers(f"{path}: {error!r}") from None


def write_meta(answers: Path, meta: Meta) -> None:
    """Replace the file in one step: whoever is killed leaves the old or the new one."""
    path = meta_path(answers)
    work = path.with_name(f".{path.name}.new")
    with work.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(meta)}, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)


def require_same(recorded: Settings, wanted: Settings, answers: Path) -> None:
    """Refuse to mix answers; a model that is not known yet fits any.

    Raises:
        SettingsDiffer: names each setting with both values.
    """
    if wanted.model is None:
        wanted = replace(wanted, model=recorded.model)
    old, new = asdict(recorded), asdict(wanted)
    different = [
        f"  {name}: recorded {_shown(old[name])}, now {_shown(new[name])}"
        for name in old
        if old[name] != new[name]
    ]
    if different:
        raise SettingsDiffer(
            "\n".join(
                [
                    f"{answers} was made with other settings than this command's:",
                    *different,
                    f"use the recorded ones ({meta_path(answers)}) or another file (-o)",
                ]
            )
        )


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
