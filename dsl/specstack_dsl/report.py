"""Problems for machines: JSON for scripts, SARIF 2.1.0 for editors and CI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specstack_dsl.errors import Problem

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_json(results: Mapping[str, Sequence[Problem]]) -> dict[str, Any]:
    """Return {files: [{file, problems}]}, one entry per checked file, sound ones included."""
    return {
        "files": [
            {"file": file, "problems": [_problem(problem) for problem in problems]}
            for file, problems in results.items()
        ]
    }


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "file": problem.position.file,
        "line": problem.position.line or None,
        "column": problem.position.column or None,
        "path": problem.path,
        "message": problem.message,
        "rule": problem.rule,
    }


def as_sarif(results: Mapping[str, Sequence[Problem]], version: str) -> dict[str, Any]:
    """Return a SARIF log with one result per problem."""
    found = [(file, problem) for file, problems in results.items() for problem in problems]
    rules = sorted({problem.rule for _, problem in found})
    driver = {"name": "specstack", "version": version, "rules": [{"id": rule} for rule in rules]}
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_result(*one) for one in found]}],
    }


def _result(checked: str, problem: Problem) -> dict[str, Any]:
    """Overrides have no place in a file: they are shown at the file that was checked."""
    uri = problem.position.file if problem.position.line else checked
    location: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if problem.position.line:
        location["region"] = {
            "startLine": problem.position.line,
            "startColumn": problem.position.column,
        }
    text = f"{problem.path}: {problem.message}" if problem.path else problem.message
    return {
        "ruleId": problem.rule,
        "level": "error",
        "message": {"text": text},
        "locations": [{"physicalLocation": location}],
    }
