"""`specstack draft eval`: from its options to a report."""

from __future__ import annotations

from specstack.evaluation.configurations import grid
from specstack.evaluation.job import Bar, Job, Options
from specstack.evaluation.report import Report


def compare(options: Options, bar: Bar) -> Report:
    """Evaluate every tree with every budget.

    Raises:
        EvaluationError, SpecError, PlanError: they do not fit.
        BadAnswers, HeadError: as `Job.run`.
    """
    compared = grid(
        options.pipeline,
        options.overrides,
        trees=options.trees,
        budgets=options.budgets,
        min_survival=options.min_survival,
        load_of_policy=options.load,
    )
    job = Job(options, compared.configurations)
    done = job.run(bar)
    bounds = job.bounds(done, bar)
    return Report.of(
        compared,
        done.evaluated,
        bounds,
        job.provenance(done, bootstrap_draws=options.draws),
        done.notes,
        num_draws=options.draws,
        seed=options.seed,
    )
