"""What `specstack parts` says: the catalogue, from the parts' own words."""

from __future__ import annotations

import click
from pydantic_core import PydanticUndefined

from specstack_dsl.errors import did_you_mean
from specstack_dsl.parts import SINGLE, Part, Section, catalogue


def _everything() -> list[tuple[str, str, type[Section]]]:
    """Return (section, kind, part); sections without kinds stand under their own name."""
    rows: list[tuple[str, str, type[Section]]] = []
    rows += [(section, kind, part) for section, kinds in catalogue().items()
             for kind, part in kinds.items()]  # fmt: skip
    rows += [(section, section, part) for section, part in SINGLE.items()]
    return rows


def overview() -> str:
    """One line per part."""
    rows = _everything()
    width = max(len(f"{section} {kind}") for section, kind, _ in rows)
    return "\n".join(
        f"{section if section == kind else f'{section} {kind}':<{width}}  {part.summary}"
        for section, kind, part in rows
    )


def describe(name: str) -> str:
    """Everything about the parts of a section or of a kind."""
    rows = [row for row in _everything() if name in row[:2]]
    if not rows:
        known = {word for row in _everything() for word in row[:2]}
        raise click.UsageError(
            f"no part or section {name!r}; there are {', '.join(sorted(known))}"
            f"{did_you_mean(name, known)}"
        )
    return "\n\n".join(_describe(*row) for row in rows)


def _describe(section: str, kind: str, part: type[Section]) -> str:
    title = section if section == kind else f"{section} {kind}"
    lines = [title, f"  {part.summary}"]
    if issubclass(part, Part) and part.implementation:
        lines.append(f"  implementation: {part.implementation}")
    for label, words in (("needs", part.needs), ("provides", part.provides)):
        if words:
            lines.append(f"  {label}: {', '.join(sorted(words))}")
    fields = part.model_fields
    width = max(map(len, fields), default=0)
    for option, field in fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else f"default {default}"
        lines.append(f"    {option:<{width}}  {field.description} ({shown})")
    return "\n".join(lines)
