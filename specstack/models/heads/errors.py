"""What can go wrong with a draft head, as the user reads it."""

from __future__ import annotations

from pydantic import ValidationError


class HeadError(Exception):
    """A head and what it is given (checkpoint, target, weights) do not fit; names both sides."""


def sentences(error: ValidationError) -> list[str]:
    """One per problem; the place stands first where a rule's own sentence does not name it."""
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        place = ".".join(map(str, problem["loc"]))
        lines.append(message if problem["type"] == "value_error" else f"{place}: {message}")
    return lines
