"""What a server says of itself: its metrics, once a second, and facts for the record.

Everything here is for the record alone: a server that has none of it can be measured, too.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specstack.metrics.definitions import METRICS
from specstack_loadtest.server import base_url, new_http

PREFIXES = ("specstack_", "sglang:", "vllm:", "llamacpp:")
LEFT_OUT = tuple(
    f"sglang:{start}"
    for start in (
        "dp_attention_", "graph_memory_", "http_", "mamba_", "num_decode_", "num_prefill_",
        "pending_prealloc_", "prealloc_", "routing_key_", "startup_", "swa_",
    )
)  # fmt: skip
"""Half of SGLang's, about other things than the load of one server."""
KINDS = ("counter", "gauge", "unknown")
"""Without histograms: their buckets would be most of the data."""
INTERVAL_S, TIMEOUT_S = 1.0, 5.0
MOST_FAILED = 5
"""Answers without metrics, one after the other, after which a server is asked no more."""
_OWN_ENDS = tuple(f"_{metric.name}" for metric in METRICS)
"""How specstack's families end, whatever their prefix is."""


def kept_values(text: str) -> dict[str, float]:
    """The counters and gauges of a page of metrics, by name and labels.

    Raises:
        ValueError: it is no page of metrics.
    """
    values = {}
    for family in text_string_to_metric_families(text):
        if family.type in KINDS and _is_kept(family.name):
            for sample in family.samples:
                values[_key(sample.name, sample.labels)] = float(sample.value)
    return values


def _is_kept(family: str) -> bool:
    if family.startswith(PREFIXES):
        return not family.startswith(LEFT_OUT)
    return family.endswith(_OWN_ENDS)


def changes(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float | None]:
    """What is not as it was; None: it is there no more. `Scrape.after` undoes it."""
    changed: dict[str, float | None] = {k: v for k, v in now.items() if before.get(k) != v}
    return changed | {key: None for key in before if key not in now}


class Scraper(threading.Thread):
    """Writes the metrics of a server to a file, a line a second, until it is closed.

    A line holds what changed since the line before: most of what a server exports seldom does.
    """

    def __init__(self, url: str, path: Path, now: Callable[[], float]) -> None:
        super().__init__(name="scraper", daemon=True)
        self.latest: Mapping[str, float] = {}
        """All values as of the last line."""
        self._address = f"{base_url(url)}/metrics"
        self._path = path
        self._now = now
        self._closing = threading.Event()

    def close(self) -> None:
        """Stop, after the line that is being made."""
        self._closing.set()
        self.join(TIMEOUT_S + INTERVAL_S)

    def run(self) -> None:
        """Scrape at whole seconds of the clock; end where there are no metrics."""
        num_failed = 0
        with new_http(TIMEOUT_S) as http, self._path.open("w", encoding="utf-8") as file:
            while not self._closing.wait(INTERVAL_S - self._now() % INTERVAL_S):
                asked_s = self._now()
                try:
                    response = http.get(self._address)
                except httpx.TransportError:
                    continue  # whether the server is gone is for others to judge
                values = _values(response)
                if values is None:
                    num_failed += 1
                    if response.status_code == 404 or num_failed == MOST_FAILED:
                        return
                    continue
                num_failed = 0
                t_s = (asked_s + self._now()) / 2
                line = {"t_s": round(t_s, 3), "values": changes(self.latest, values)}
                file.write(json.dumps(line) + "\n")
                file.flush()
                self.latest = values


def _values(response: httpx.Response) -> dict[str, float] | None:
    """Those of a page; None: the server had none to show."""
    if response.status_code != 200:
        return None
    try:
        return kept_values(response.text)
    except ValueError:
        return None


def latest_gauge(values: Mapping[str, float], ending: str) -> float | None:
    """The value of the first series whose family ends like that."""
    found = (v for key, v in values.items() if key.partition("{")[0].endswith(ending))
    return next(found, None)


def server_facts(url: str) -> dict[str, Any]:
    """What the server tells of itself, by page; whatever does not answer is left out.

    `specstack` is there when a specstack plan runs in it.
    """
    facts: dict[str, Any] = {"url": base_url(url)}
    with new_http(TIMEOUT_S) as http:
        models = _page(http, url, "/v1/models")
        if models:
            facts["models"] = models.get("data")
        info = _page(http, url, "/server_info")
        facts.update({key: info[key] for key in SERVER_INFO if info.get(key) is not None})
        states = info.get("internal_states")
        state = states[0] if isinstance(states, list) and states else {}
        if isinstance(state, dict):
            facts.update({key: state[key] for key in STATE if state.get(key) is not None})
        status = _page(http, url, "/specstack/status")
        if status:
            facts["specstack_status"] = status
    return facts


SERVER_INFO = (
    "version", "model_path", "served_model_name", "dtype", "quantization", "kv_cache_dtype",
    "device", "tp_size", "dp_size", "attention_backend", "max_total_num_tokens",
    "context_length", "chunked_prefill_size", "max_prefill_tokens", "schedule_policy",
    "disable_radix_cache", "disable_cuda_graph", "enable_cache_report", "random_seed",
    "speculative_algorithm",
)  # fmt: skip
"""What of SGLang's `/server_info` bears on speed."""
STATE = ("effective_max_running_requests_per_dp", "memory_usage", "specstack")
"""The same of the state of its first scheduler."""


def _page(http: httpx.Client, url: str, path: str) -> dict[str, Any]:
    """A page's object; empty when there is none."""
    try:
        response = http.get(base_url(url) + path)
        found = response.json() if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    return name + "{" + ",".join(f'{k}="{_escaped(labels[k])}"' for k in sorted(labels)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
