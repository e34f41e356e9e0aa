"""Prompts that the target answers first: chat messages to token ids, and their data sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specstack.evaluation.errors import EvaluationError
from specstack.evaluation.known_texts import KnownText
from specstack.prompts import read_prompts


def sources_of(file: Path) -> dict[int, str]:
    """The field `source` of the lines that have one, by the number of the line."""
    found = {}
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        record = json.loads(line) if line.strip() else None
        if isinstance(record, dict) and isinstance(record.get("source"), str):
            found[number] = record["source"]
    return found


def read_prompt_files(files: Sequence[Path], path: str, num: int | None) -> list[KnownText]:
    """Read the first `num` prompts of each file as texts without an answer.

    Raises:
        EvaluationError: a file has no prompts, or the target no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokens: Any = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path} has no tokenizer, use --answers: {error}") from None
    if not tokens.chat_template:
        raise EvaluationError(f"{path} has no chat template: use --answers")
    texts = []
    for file in files:
        try:
            prompts = read_prompts(file, num)
            sources = sources_of(file)
        except ValueError as error:
            raise EvaluationError(str(error)) from None
        for prompt in prompts:
            messages = [message.as_data() for message in prompt.messages]
            ids = tokens.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            texts.append(KnownText(sources.get(prompt.line, file.stem), tuple(ids), ()))
    return texts


def end_tokens_of(model: Any) -> frozenset[int]:
    """Tokens that end an answer of a transformers model."""
    found = model.generation_config.eos_token_id
    if found is None:
        found = model.config.eos_token_id
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
