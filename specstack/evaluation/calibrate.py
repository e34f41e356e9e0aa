"""`specstack draft calibrate`: from its options to the file that a tree's `calibration` names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specstack.calibration_file import CalibrationFile
from specstack.evaluation.configurations import BEST_FIRST, uncalibrated
from specstack.evaluation.errors import EvaluationError
from specstack.evaluation.fit_calibration import PlaceCounts, fit, held_out
from specstack.evaluation.job import Bar, Job, Options

DIGITS = 6


@dataclass(frozen=True)
class CalibrateOptions:
    """The command line; `specstack draft calibrate --help` describes each."""

    pipeline: Path
    answers: tuple[Path, ...]
    overrides: tuple[str, ...]
    budget: int
    ranks: int
    prior: float
    num: int | None
    holdout_share: float | None
    max_length: int
    batch_size: int
    check_greedy: bool | None
    device: str
    dtype: str


@dataclass(frozen=True)
class Calibrated:
    """What was measured, and what to say about it."""

    file: CalibrationFile
    notes: tuple[str, ...]


def calibrate(options: CalibrateOptions, bar: Bar) -> Calibrated:
    """Replay the answers with large trees of the best paths and fit a factor for every place.

    Raises:
        EvaluationError, SpecError, PlanError: they do not fit.
        BadAnswers, HeadError: as `Job.run`.
    """
    configuration = uncalibrated(options.pipeline, options.overrides, options.budget)
    job = Job(_evaluation(options), (configuration,), keeps_places=True)
    done = job.run(bar)
    places, size = done.evaluated.notes[0].places, (configuration.reach, options.ranks)
    if not len(places):
        raise EvaluationError("nothing was drafted for these answers: there is nothing to measure")
    counts = PlaceCounts.of(places, *size)
    judged = held_out(places, done.evaluated.texts, size, options.prior)
    file = CalibrationFile(
        log_factor=fit(counts, options.prior).round(DIGITS).tolist(),
        reached=counts.reached.tolist(),
        right=counts.right.tolist(),
        sum_q=counts.sum_q.round(DIGITS).tolist(),
        held_out=judged,
        provenance=job.provenance(
            done, sequences=len(done.evaluated.texts), draft_budget=options.budget,
            prior=options.prior,
        ),
    )  # fmt: skip
    return Calibrated(file, (*done.notes, *_verdict(file)))


def _verdict(file: CalibrationFile) -> tuple[str, ...]:
    judged = file.held_out
    if judged is None:
        return ("one prompt alone has drafts: whether the factors help others is not known",)
    said = (
        f"log loss per draft, fitted on {judged.fitted_drafts} drafts of one half of the prompts, "
        f"on the {judged.drafts} of the other: {judged.log_loss_before:.4f} before, "
        f"{judged.log_loss_after:.4f} after"
    )
    if judged.log_loss_after < judged.log_loss_before:
        return (said,)
    return (said, "the factors do not help there: give more answers, or leave tree.calibration out")


def _evaluation(options: CalibrateOptions) -> Options:
    return Options(
        pipeline=options.pipeline, answers=options.answers, prompts=(), sources=None,
        overrides=options.overrides, trees=(BEST_FIRST,), budgets=(options.budget,),
        min_survival=0.0, load=1, num=options.num, holdout_share=options.holdout_share,
        max_length=options.max_length, batch_size=options.batch_size, live=False,
        temperature=0.0, top_p=1.0, max_tokens=2, check_greedy=options.check_greedy, bound=0,
        draws=0, seed=0, device=options.device, dtype=options.dtype,
    )  # fmt: skip
