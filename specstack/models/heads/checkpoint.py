"""Heads on disk: `config.json` and `model.safetensors` (weights, d2t, t2d; never the tables)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specstack.models.heads.autoregressive import AutoregressiveHead
from specstack.models.heads.block import BlockHead
from specstack.models.heads.config import HeadConfig
from specstack.models.heads.errors import HeadError, sentences
from specstack.models.heads.tables import TargetTables
from specstack.models.heads.vocabulary import DraftVocabulary

Head = BlockHead | AutoregressiveHead
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


def make_head(
    config: HeadConfig, tables: TargetTables, vocabulary: DraftVocabulary | None = None
) -> Head:
    """A new head of the config's form."""
    form = BlockHead if config.form == "block" else AutoregressiveHead
    return form(config, tables, vocabulary)


def save_head(
    head: Head, folder: Path, card: str | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the head into `folder` (made if need be).

    Args:
        card: its README.md.
        dtype: of the weights; None: the head's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in head.state_dict().items()}
    if dtype is not None:
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(head.config.model_dump_json(indent=2) + "\n", "utf-8")
    if card is not None:
        (folder / CARD).write_text(card, "utf-8")


def read_head_config(folder: Path) -> HeadConfig:
    """Read and check `config.json`."""
    file = folder / CONFIG
    try:
        text = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise HeadError(f"{folder} has no {CONFIG}: it is not a draft head") from None
    except (OSError, ValueError) as error:
        raise HeadError(f"cannot read {file}: {error}") from None
    kind = text.get("model_type") if isinstance(text, dict) else None
    if kind != "specstack_head":
        raise HeadError(f"{file} has model_type {kind!r}, a draft head has 'specstack_head'")
    try:
        return HeadConfig.model_validate(text)
    except ValidationError as error:
        lines = "\n  ".join(sentences(error))
        raise HeadError(f"{file} is not a head's:\n  {lines}") from None


def load_head(folder: Path, tables: TargetTables, dtype: torch.dtype = torch.float32) -> Head:
    """Read a head for the target with these tables; it takes their device.

    Raises:
        HeadError: files are missing or broken, or do not fit each other or the target.
    """
    config = read_head_config(folder)
    _check_fingerprint(config, tables)
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise HeadError(f"{folder} has no {WEIGHTS}") from None
    except (OSError, SafetensorError) as error:
        raise HeadError(f"cannot read {folder / WEIGHTS}: {error}") from None
    vocabulary = _vocabulary(config, tensors, folder)
    if vocabulary is not None:
        device = tables.embedding.device
        vocabulary = DraftVocabulary(vocabulary.d2t.to(device), vocabulary.t2d.to(device))
    head = make_head(config, tables.to(dtype=dtype), vocabulary)
    _check_tensors(head.state_dict(), tensors, folder)
    head.load_state_dict(tensors)
    return head


def _check_fingerprint(config: HeadConfig, tables: TargetTables) -> None:
    trained = config.target.fingerprint
    sizes = (config.target.vocab_size, config.target.hidden_size)
    if trained is None or tables.embedding.shape != sizes:
        return  # other sizes have a message of their own
    if (found := tables.fingerprint()) != trained:
        raise HeadError(
            f"the head was trained with {config.target.name} of fingerprint {trained}; "
            f"this target has the same sizes but other weights (fingerprint {found})"
        )


def _vocabulary(
    config: HeadConfig, tensors: dict[str, Tensor], folder: Path
) -> DraftVocabulary | None:
    if config.draft_vocab_size is None:
        return None
    sizes = {"d2t": config.draft_vocab_size, "t2d": config.target.vocab_size}
    for name, size in sizes.items():
        found = tuple(tensors[name].shape) if name in tensors else "none"
        if found != (size,):
            raise HeadError(
                f"{folder / CONFIG} asks for {name} of shape ({size},), {WEIGHTS} has {found}"
            )
    return DraftVocabulary(tensors["d2t"], tensors["t2d"])


def _check_tensors(expected: dict[str, Tensor], found: dict[str, Tensor], folder: Path) -> None:
    lines = [f"missing: {name}" for name in expected if name not in found]
    lines += [f"unexpected: {name}" for name in sorted(found) if name not in expected]
    for name in expected:
        if name in found and (has := found[name].shape) != (asks := expected[name].shape):
            lines.append(f"{name}: shape {tuple(has)}, the config asks for {tuple(asks)}")
    if lines:
        raise HeadError(
            f"{folder / WEIGHTS} does not fit {CONFIG} beside it:\n  " + "\n  ".join(lines)
        )
