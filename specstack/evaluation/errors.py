"""Why an evaluation cannot be made, as the user reads it."""

from __future__ import annotations


class EvaluationError(ValueError):
    """The pipeline, the answers and the options do not fit together; names both sides."""
