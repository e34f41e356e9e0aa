"""The pipeline language: text to a frozen, validated Pipeline. No torch, no engine."""

from specstack_dsl.errors import PlanError, Problem, SpecError
from specstack_dsl.pipeline import Pipeline, load, loads

__all__ = ["Pipeline", "PlanError", "Problem", "SpecError", "load", "loads"]
