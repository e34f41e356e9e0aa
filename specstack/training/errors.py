"""Why a training run cannot begin or go on, as the user reads it."""

from __future__ import annotations


class RunError(ValueError):
    """A run does not fit its files, its cache or its earlier part; names both sides."""
