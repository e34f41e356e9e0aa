"""What can go wrong with a packaged model, as the user reads it."""

from __future__ import annotations


class ModelError(Exception):
    """A packaged model cannot be had. `message` says what was found, `hint` what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UnknownModelError(ModelError):
    """The catalogue has no model of this name: a mistake in the request, not in the machine."""
