"""PromQL over the exported metrics, made from the names of `specstack.metrics.definitions`.

Every name and every label is looked up, so a metric that was renamed breaks the build of the
dashboards and not the panels of whoever looks at them. A ratio whose denominator is 0 has no value
(a gap in the picture) instead of a number that means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from specstack.metrics.definitions import METRICS, Metric

PREFIX = "specstack"
"""The default of a pipeline's `metrics.prefix`; dashboards and rules read this one only."""

SGLANG_METRICS: tuple[Metric, ...] = (
    Metric("sglang:time_to_first_token_seconds", "histogram", "From a request to its first token."),
    Metric("sglang:inter_token_latency_seconds", "histogram", "Between tokens of a request."),
    Metric("sglang:num_running_reqs", "gauge", "Requests in the batch."),
    Metric("sglang:num_queue_reqs", "gauge", "Requests that wait."),
    Metric("sglang:num_aborted_requests", "counter", "Requests that were aborted."),
    Metric("sglang:http_responses", "counter", "Responses by status.", ("status_code",)),
)
"""What the dashboards read of SGLang 0.5.23's own metrics (`sglang.srt.observability`)."""

SGLANG = "sglang:"
"""Their prefix. A Prometheus before 3.0 gets it as `sglang_`: prometheus_client escapes colons in
OpenMetrics 1.0.0 unless the scraper asks it not to. Queries therefore match both."""

RECORDED = (
    "instance:specstack_speedup:rate10m",
    "instance:specstack_budget_switches:per_minute5m",
    "instance:specstack_cached_prompt_share:rate30m",
)
"""Recording rules (serving/prometheus/rules.yaml) that dashboards share with alerts."""

WINDOW = "$__rate_interval"
CACHED = "cache"
"""Value of the label `source` of prompt tokens that the prefix cache held."""
SERVER_LABELS = ("model_name", "instance")
_WITHOUT_MODEL = frozenset({"sglang:http_responses"})
_METRICS = {metric.name: metric for metric in (*METRICS, *SGLANG_METRICS)}


class UnknownName(ValueError):
    """A query asks for a metric or a label that nothing exports."""


def _metric(name: str) -> Metric:
    if name in _METRICS:
        return _METRICS[name]
    near = get_close_matches(name, _METRICS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UnknownName(f"no metric is named {name!r} in specstack.metrics.definitions{hint}")


def _check_labels(metric: Metric, names: Sequence[str]) -> None:
    known = (*SERVER_LABELS, *metric.labels, *(("le",) if metric.kind == "histogram" else ()))
    for name in names:
        if name not in known:
            raise UnknownName(f"{metric.name} has no label {name!r}; it has {', '.join(known)}")


def _series(metric: Metric, matchers: Mapping[str, str], part: str = "") -> str:
    """Return a selector: the metric, of the selected servers, with further matchers."""
    server = [name for name in SERVER_LABELS if name == "instance" or _has_model(metric)]
    chosen = [f'{name}=~"${name}"' for name in server]
    chosen += [f'{name}=~"{value}"' for name, value in matchers.items()]
    name = f"{metric.exported_name}{part}"
    if metric.name.startswith(SGLANG):
        either = name.replace(SGLANG, "sglang[:_]")
        return f'{{__name__=~"{either}",{",".join(chosen)}}}'
    return f"{PREFIX}_{name}{{{','.join(chosen)}}}"


def _has_model(metric: Metric) -> bool:
    return metric.name not in _WITHOUT_MODEL


def _total(operator: str, by: Sequence[str], inner: str) -> str:
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"{operator}{grouping} ({inner})"


def rate(name: str, by: Sequence[str] = (), part: str = "", **matchers: str) -> str:
    """Per second, over the selected servers.

    Args:
        by: labels to keep apart.
        part: of a histogram: "_sum", "_count" or "_bucket".
        matchers: regular expressions by label.

    Raises:
        UnknownName: there is no such metric, or it has no such label.
    """
    metric = _metric(name)
    if (metric.kind == "histogram") != bool(part) or metric.kind == "gauge":
        raise UnknownName(f"{name} is a {metric.kind}: rate of part {part!r} has no meaning")
    _check_labels(metric, (*by, *matchers))
    return _total("sum", by, f"rate({_series(metric, matchers, part)}[{WINDOW}])")


def gauge(name: str, by: Sequence[str] = (), operator: str = "max") -> str:
    """Return a gauge's value now; `operator` puts together what `by` does not keep apart."""
    metric = _metric(name)
    if metric.kind != "gauge":
        raise UnknownName(f"{name} is a {metric.kind}, not a gauge")
    _check_labels(metric, by)
    return _total(operator, by, _series(metric, {}))


def recorded(name: str) -> str:
    """Return what a recording rule wrote, of the selected servers."""
    if name not in RECORDED:
        raise UnknownName(f"no recording rule is named {name!r}; there are {', '.join(RECORDED)}")
    return f'{name}{{model_name=~"$model_name",instance=~"$instance"}}'


def ratio(numerator: str, denominator: str) -> str:
    """Divide; no value where the denominator is 0."""
    return f"{numerator} / ({denominator} > 0)"


def ratio_to_one(numerator: str, denominator: str) -> str:
    """Divide each series of the numerator by the one series of the denominator."""
    return f"{numerator} / on () group_left () ({denominator} > 0)"


def mean(name: str, by: Sequence[str] = ()) -> str:
    """Mean of a histogram's observations."""
    return ratio(rate(name, by, "_sum"), rate(name, by, "_count"))


def quantile(q: float, name: str, by: Sequence[str] = ()) -> str:
    """Return a quantile of a histogram; no value where nothing was observed (Prometheus: NaN)."""
    return f"histogram_quantile({q}, {rate(name, ('le', *by), '_bucket')}) >= 0"


def goodput(side: str) -> str:
    """Tokens per second of rounds, on one side of the comparison (label `side`)."""
    return ratio(rate("goodput_tokens", side=side), rate("goodput_seconds", side=side))


def or_zero(query: str) -> str:
    """Say 0 where there is nothing to count: of events that may never have happened."""
    return f"({query} or vector(0))"
