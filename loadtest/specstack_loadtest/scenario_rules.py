"""What the sections of a scenario must agree on: one small function each, named after its sentence.

A rule yields (path, message). The last two read the files that the scenario names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from specstack_loadtest.arrivals import phases_of, traced_requests
from specstack_loadtest.scenario import Scenario, Trace
from specstack_loadtest.texts import read_scripts

Finding = tuple[str, str]
Rule = Callable[[Scenario], Iterator[Finding]]


def a_phase_stops_at_one_measure(scenario: Scenario) -> Iterator[Finding]:
    """The measured part of a phase is a stretch of time, or a number of requests."""
    stop = scenario.stop
    if stop.seconds is None and stop.requests is None:
        yield "stop", "missing: state seconds or requests"
    elif stop.seconds is not None and stop.requests is not None:
        yield "stop.requests", "a phase stops after seconds or after requests: remove one of them"


def several_phases_take_turns_by_time(scenario: Scenario) -> Iterator[Finding]:
    """A phase that stops by requests has no end that the next one could begin at."""
    num = len(phases_of(scenario))
    if num > 1 and scenario.stop.requests is not None:
        yield (
            "stop.requests",
            f"{num} phases need to know how long each lasts: state stop.seconds instead",
        )


def a_warmup_is_counted_as_its_phase(scenario: Scenario) -> Iterator[Finding]:
    """The measured part begins where the warm-up ends, in the same measure."""
    for measure, other in (("seconds", "requests"), ("requests", "seconds")):
        given = getattr(scenario.warmup, measure)
        if given is not None and getattr(scenario.stop, measure) is None:
            yield f"warmup.{measure}", f"the phase stops after {other}: state warmup.{other}"


def a_warmup_ends_before_its_phase(scenario: Scenario) -> Iterator[Finding]:
    """Else nothing would be measured."""
    for measure in ("seconds", "requests"):
        given, most = getattr(scenario.warmup, measure), getattr(scenario.stop, measure)
        if given is not None and most is not None and given >= most:
            yield (
                f"warmup.{measure}",
                f"nothing is left to measure: expected below {most:g}, when the phase stops,"
                f" found {given:g}",
            )


def lengths_have_one_home(scenario: Scenario) -> Iterator[Finding]:
    """A trace has lengths of its own; without one, an answer needs an end."""
    work = scenario.workload
    if not isinstance(scenario.arrivals, Trace):
        if work.output_tokens is None:
            yield "workload.output_tokens", "missing (most tokens of an answer)"
        return
    for name in ("prompt_tokens", "output_tokens"):
        if getattr(work, name) is not None:
            yield (
                f"workload.{name}",
                "the trace has its own lengths: remove it here (arrivals.scale_lengths and"
                " arrivals.scale_outputs change them)",
            )


def a_trace_has_single_requests(scenario: Scenario) -> Iterator[Finding]:
    """A row is one request of a recorded length, which turns and prefixes would add to."""
    if isinstance(scenario.arrivals, Trace):
        if scenario.workload.turns > 1:
            yield "workload.turns", "rows of a trace are single requests: remove it"
        if scenario.workload.shared_prefix is not None:
            yield "workload.shared_prefix", "the trace has its own prompt lengths: remove it"


def a_mean_length_lies_between_its_bounds(scenario: Scenario) -> Iterator[Finding]:
    """Bounds beyond the mean would be the only length there is."""
    for name in ("prompt_tokens", "output_tokens"):
        law, path = getattr(scenario.workload, name), f"workload.{name}"
        if law is None:
            continue
        if law.max is not None and law.max < law.min:
            yield f"{path}.max", f"expected at least min, {law.min}, found {law.max}"
        elif law.mean < law.min:
            yield f"{path}.mean", f"expected at least min, {law.min}, found {law.mean:g}"
        elif law.max is not None and law.mean > law.max:
            yield f"{path}.mean", f"expected at most max, {law.max}, found {law.mean:g}"


def thinking_takes_a_second_turn(scenario: Scenario) -> Iterator[Finding]:
    """There is nothing to think about before the first."""
    if scenario.workload.think_s and scenario.workload.turns == 1:
        yield "workload.think_s", "conversations have one turn: raise workload.turns, or remove it"


def a_schema_ends_its_answers(scenario: Scenario) -> Iterator[Finding]:
    """What follows a schema cannot go on to an exact length."""
    if scenario.workload.exact_output and scenario.workload.structured is not None:
        yield (
            "workload.exact_output",
            "answers by a schema end where it says: remove this, or workload.structured",
        )


def prompts_can_be_read(scenario: Scenario) -> Iterator[Finding]:
    """Every prompt file is there and holds nothing but prompts."""
    for place, name in enumerate(scenario.workload.prompts):
        try:
            read_scripts(scenario.resolve(name))
        except OSError as error:
            yield f"workload.prompts.{place}", _unreadable(name, error)
        except ValueError as error:
            yield f"workload.prompts.{place}", str(error)


def a_trace_can_be_read_and_lasts(scenario: Scenario) -> Iterator[Finding]:
    """The trace is there, and has requests until the phase stops."""
    load, stop = scenario.arrivals, scenario.stop
    if not isinstance(load, Trace):
        return
    try:
        requests = traced_requests(scenario, load)
    except OSError as error:
        yield "arrivals.file", _unreadable(load.file, error)
        return
    except ValueError as error:
        yield "arrivals.file", str(error)
        return
    if not requests:
        after = f" after the first {load.skip}" if load.skip else ""
        yield "arrivals.file", f"{load.file!r} has no request{after}"
    elif stop.requests is not None and stop.requests > len(requests):
        yield (
            "stop.requests",
            f"expected at most {len(requests)}, those of the trace, found {stop.requests}",
        )
    elif stop.seconds is not None and stop.seconds > requests[-1].seconds:
        yield (
            "stop.seconds",
            f"the trace ends after {requests[-1].seconds:.1f} s, found {stop.seconds:g}:"
            " stop before, or raise arrivals.scale_time",
        )


def _unreadable(name: str, error: OSError) -> str:
    return f"cannot read {name!r}: {(error.strerror or str(error)).lower()}"


RULES: tuple[Rule, ...] = (
    a_phase_stops_at_one_measure,
    several_phases_take_turns_by_time,
    a_warmup_is_counted_as_its_phase,
    a_warmup_ends_before_its_phase,
    lengths_have_one_home,
    a_trace_has_single_requests,
    a_mean_length_lies_between_its_bounds,
    thinking_takes_a_second_turn,
    a_schema_ends_its_answers,
    prompts_can_be_read,
    a_trace_can_be_read_and_lasts,
)
