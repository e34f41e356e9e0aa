"""The contract of a drafter: propose continuations of each running request.

Beside it, what head drafters exchange with the engine: which features they read, and what it
lends to them. Letters: B requests, M candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from specstack.models.heads.tables import TargetTables
from specstack.types import CommittedTokens, DraftBatch, DraftProposal


@dataclass(frozen=True)
class FeatureNeeds:
    """What a drafter reads from the target's forwards, in this order."""

    target_layers: tuple[int, ...]
    """0-based outputs of these layers: `TargetFeatures.hidden`."""
    kv_layers: tuple[int, ...]
    """Layers of `TargetFeatures.keys` and `values`."""


@dataclass(frozen=True)
class DraftRuntime:
    """What the engine lends to a drafter."""

    tables: TargetTables
    num_kv_slots: int
    """All `kv_slots` are below this."""
    num_slots: int
    """All request `slots` are below this."""
    device: torch.device
    dtype: torch.dtype
    prepare: Callable[[nn.Module], None] | None = None
    """Makes a module whose weights no longer change faster on this device, in place."""


class Drafter(Protocol):
    """Keeps state per slot: a small integer that a request owns while it runs.

    A drafter of tokens hears them on the host: `begin` when a request has been prefilled (again,
    after a retraction), `observe` with every token emitted since. A drafter of features hears them
    on the device: `absorb`, after every prefill and round. A slot is reused without notice.
    """

    @property
    def needs_tokens(self) -> bool:
        """Whether `begin` and `observe` are wanted; the host waits for emitted tokens if so."""

    @property
    def needs(self) -> FeatureNeeds | None:
        """The features that `absorb` wants; None: it is never called."""

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn at random, for which the batch must bring a `Drawing`."""

    def attach(self, runtime: DraftRuntime) -> None:
        """Take what the engine lends; once, before anything else, if `needs` is not None."""

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Start a request whose committed tokens (prompt and output so far) are `tokens`."""

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens that the request has emitted, in order."""

    def absorb(self, committed: CommittedTokens) -> None:
        """Take the features of tokens that are final now. Host sync: none."""

    def forget(self) -> None:
        """Drop what is kept of requests that have ended; called while none runs."""

    def propose(self, batch: DraftBatch, draft_budget: int) -> DraftProposal:
        """Propose at least the best `draft_budget` candidates (if there are as many) per request.

        All that was emitted has been observed or absorbed; candidates continue the bonus token.
        """


class TokenDrafter:
    """What a drafter that reads tokens alone leaves out."""

    needs_tokens = True
    needs: FeatureNeeds | None = None
    draws = False

    def attach(self, runtime: DraftRuntime) -> None:
        """Nothing is lent."""

    def absorb(self, committed: CommittedTokens) -> None:
        """Never called."""
        raise AssertionError("a drafter of tokens absorbs no features")

    def forget(self) -> None:
        """Nothing is kept beyond a slot's request."""


class FeatureDrafter:
    """What a drafter that reads features alone leaves out."""

    needs_tokens = False
    draws = False

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Never called."""
        raise AssertionError("a drafter of features hears no tokens")

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        """Never called."""
        raise AssertionError("a drafter of features hears no tokens")

    def forget(self) -> None:
        """Nothing is kept beyond a slot's request."""
