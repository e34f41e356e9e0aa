"""The target's features of a batch: computed on the fly, or read from a cache on disk.

The cache keeps bfloat16: activations of some targets reach 24,800 and more, near float16's limit,
and heads normalise every tap. Its shards are written whole, with a SHA-256 beside each; a shard
that is torn or damaged is made again. Letters: T tokens of a shard's texts, B sequences, L tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specstack.models.heads.config import ContextConfig
from specstack.models.heads.features import TargetFeatures
from specstack.models.store import locked, sha256_of
from specstack.training.batches import Batch
from specstack.training.errors import RunError
from specstack.training.objective import Seen
from specstack.training.target_model import FrozenTarget
from specstack.training.texts import Text

FORMAT = 1
SETTINGS = "cache.json"
TEXTS_PER_SHARD = 64
_TEXTS_PER_FORWARD = 8
_NAMES = ("hidden", "keys", "values", "final")
FeatureSource = Callable[[Batch], Seen]


class OnTheFly:
    """Runs the target for every batch."""

    def __init__(self, target: FrozenTarget, context: ContextConfig) -> None:
        self.target, self.context = target, context

    def __call__(self, batch: Batch) -> Seen:
        seen = self.target.features(batch.tokens, self.context)
        return Seen(seen.features.to(dtype=torch.float32), seen.final)


@dataclass(frozen=True)
class _Shard:
    path: Path
    texts: range

    @property
    def note(self) -> Path:
        """The file beside it."""
        return self.path.with_suffix(".json")

    def is_whole(self) -> bool:
        try:
            expected = json.loads(self.note.read_bytes())["sha256"]
            return bool(expected == sha256_of(self.path))
        except (OSError, ValueError, LookupError, TypeError):
            return False


class FeatureCache:
    """Features of all texts of a run, in shards."""

    def __init__(
        self, folder: Path, texts: Sequence[Text], settings: dict[str, Any], device: torch.device
    ) -> None:
        """`settings` are what the features depend on; a folder made with others is refused."""
        self.folder, self.texts, self.device = folder, texts, device
        self.settings = {"format": FORMAT, "texts_per_shard": TEXTS_PER_SHARD, **settings}
        starts = range(0, len(texts), TEXTS_PER_SHARD)
        self.shards = [
            _Shard(
                folder / f"shard-{i:05d}.safetensors",
                range(start, min(start + TEXTS_PER_SHARD, len(texts))),
            )
            for i, start in enumerate(starts)
        ]
        self._open: dict[Path, Any] = {}

    def fill(
        self,
        target: FrozenTarget,
        context: ContextConfig,
        max_gb: float,
        echo: Callable[[str], None],
    ) -> None:
        """Make what is missing or damaged; one process at a time.

        Raises:
            RunError: the cache would be too large, or was made with other settings.
        """
        self._require_room(context, target, max_gb)
        self.folder.mkdir(parents=True, exist_ok=True)

        def on_wait(pid: str) -> None:
            echo(f"waiting for process {pid}, which is filling {self.folder}")

        with locked(self.folder / ".lock", on_wait=on_wait):
            self._require_same_settings()
            broken = [shard for shard in self.shards if not shard.is_whole()]
            damaged = [shard.path.name for shard in broken if shard.path.exists()]
            if damaged:
                echo(f"features: damaged or half-written, made again: {', '.join(damaged)}")
            for done, shard in enumerate(broken):
                echo(f"features: shard {done + 1} of {len(broken)}")
                self._write(shard, target, context)

    def __call__(self, batch: Batch) -> Seen:
        """Read the features of a batch."""
        found = [self._read(i) for i in batch.index]

        def padded(name: str) -> Tensor | None:
            if name not in found[0]:
                return None
            rows = pad_sequence([tensors[name] for tensors in found], batch_first=True)
            return rows.to(self.device)

        hidden, keys, values, final = map(padded, _NAMES)
        assert final is not None
        features = TargetFeatures(hidden, keys, values).to(dtype=torch.float32)
        return Seen(features, final)

    def _require_room(self, context: ContextConfig, target: FrozenTarget, max_gb: float) -> None:
        config = target.model.config
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        kv_width = config.num_key_value_heads * head_dim
        width = (len(context.target_layers) + 1) * config.hidden_size
        width += 2 * len(context.kv_layers) * kv_width
        needed = 2 * width * sum(len(text.tokens) for text in self.texts) / 1e9
        if needed > max_gb:
            raise RunError(
                f"the features of {len(self.texts)} texts take {needed:.1f} GB in the cache, more "
                f"than features.max_gb {max_gb:g}: raise it, tap fewer layers, or use on_the_fly"
            )

    def _require_same_settings(self) -> None:
        file = self.folder / SETTINGS
        if not file.exists():
            file.write_text(json.dumps(self.settings, indent=2) + "\n", "utf-8")
            return
        recorded = json.loads(file.read_bytes())
        different = [
            f"  {name}: cached {recorded.get(name)!r}, now {value!r}"
            for name, value in self.settings.items()
            if recorded.get(name) != value
        ]
        if different:
            raise RunError(
                "\n".join([f"{self.folder} holds the features of another run:", *different])
            )

    def _write(self, shard: _Shard, target: FrozenTarget, context: ContextConfig) -> None:
        """Replace a shard; without its hash meanwhile, so that a killed process leaves no shard."""
        shard.note.unlink(missing_ok=True)
        rows: dict[int, dict[str, Tensor]] = {}
        for tokens, index in self._forwards(shard):
            seen = target.features(tokens.to(self.device), context)
            fields = (seen.features.hidden, seen.features.keys, seen.features.values, seen.final)
            for row, i in enumerate(index):
                length = len(self.texts[i].tokens)
                rows[i] = {
                    name: field[row, :length].to(torch.bfloat16).cpu()
                    for name, field in zip(_NAMES, fields, strict=True)
                    if field is not None
                }
        names = rows[shard.texts[0]].keys()
        work = shard.path.with_suffix(".new")
        save_file({n: torch.cat([rows[i][n] for i in shard.texts]) for n in names}, work)
        digest = sha256_of(work)
        work.replace(shard.path)
        shard.note.write_text(json.dumps({"sha256": digest}) + "\n", "utf-8")

    def _forwards(self, shard: _Shard) -> Iterator[tuple[Tensor, list[int]]]:
        order = sorted(shard.texts, key=lambda i: len(self.texts[i].tokens))
        for start in range(0, len(order), _TEXTS_PER_FORWARD):
            index = order[start : start + _TEXTS_PER_FORWARD]
            tokens = [torch.from_numpy(self.texts[i].tokens).long() for i in index]
            yield pad_sequence(tokens, batch_first=True), index

    def _read(self, i: int) -> dict[str, Tensor]:
        shard = self.shards[i // TEXTS_PER_SHARD]
        if shard.path not in self._open:
            self._open[shard.path] = safe_open(shard.path, framework="pt")
        file = self._open[shard.path]
        start = sum(len(self.texts[j].tokens) for j in range(shard.texts.start, i))
        end = start + len(self.texts[i].tokens)
        return {name: file.get_slice(name)[start:end] for name in file.keys()}  # noqa: SIM118
