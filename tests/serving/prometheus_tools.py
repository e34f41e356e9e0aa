"""Prometheus and promtool for the tests, and a Prometheus for the length of a block.

They come from the PATH, else from Debian's package `prometheus`, unpacked (not installed, so that
nobody needs to be root) into the cache folder of specstack and found there from then on. Setting
SPECSTACK_NO_PROMETHEUS=1 skips the tests that need them; without it, missing tools are a failure.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from specstack.models.packaged import cache_folder
from specstack.processes import free_port

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "serving/grafana/dashboards"
PROMETHEUS = ROOT / "serving/prometheus"
RULES = PROMETHEUS / "rules.yaml"
SKIP = "SPECSTACK_NO_PROMETHEUS"


def tool(name: str) -> Path:
    """Return the path of `prometheus` or `promtool`; fetch the package when it is missing."""
    if os.environ.get(SKIP) == "1":
        pytest.skip(f"{SKIP}=1")
    if found := shutil.which(name):
        return Path(found)
    unpacked = cache_folder() / "tools" / "prometheus"
    if not (unpacked / "usr/bin" / name).exists():
        _fetch("prometheus", unpacked)
    return unpacked / "usr/bin" / name


def _fetch(package: str, target: Path) -> None:
    """Download a Debian package and unpack it into `target`, with package lists of our own."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        lists, archives, tree = (Path(folder, name) for name in ("lists", "archives", "tree"))
        for path in (lists, archives):
            (path / "partial").mkdir(parents=True)
        apt = ["apt-get", "-q", "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={archives}"]
        try:
            _run([*apt, "update"], folder)
            _run([*apt, "download", package], folder)
            (file,) = Path(folder).glob(f"{package}_*.deb")
            _run(["dpkg-deb", "-x", str(file), str(tree)], folder)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            output = getattr(error, "stderr", None) or str(error)
            pytest.fail(
                f"`{package}` is neither on the PATH nor to be had from Debian's packages: install"
                f" it, or set {SKIP}=1 to leave its tests out.\n{output}"
            )
        if not target.exists():  # another run may have been faster
            tree.rename(target)


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; the caller looks at the exit code."""
    command = [str(tool("promtool")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@contextmanager
def running_prometheus(
    folder: Path, targets: Mapping[str, str], rules: Path = RULES, seconds: int = 1
) -> Iterator[str]:
    """Scrape `targets` (address by value of the label `instance`) every so many seconds.

    Yields the base URL. Job and rules are those of serving/prometheus.
    """
    config = folder / "prometheus.yaml"
    statics = [{"targets": [at], "labels": {"instance": name}} for name, at in targets.items()]
    job = {"job_name": "specstack", "metrics_path": "/metrics", "static_configs": statics}
    every = f"{seconds}s"
    times = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    config.write_text(
        yaml.safe_dump({"global": times, "rule_files": [str(rules)], "scrape_configs": [job]})
    )
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(tool("prometheus")), f"--config.file={config}", f"--web.listen-address={address}",
        f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn",
    ]  # fmt: skip
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, f"http://{address}/-/ready", log)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"Prometheus ended: {log.read_text(errors='replace')}")
        try:
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus is not ready: {log.read_text(errors='replace')}")


@dataclass(frozen=True)
class PanelQuery:
    """One query of one panel of a committed dashboard."""

    panel: str
    """dashboard / title of the panel"""
    expr: str
    bounds: tuple[float, float]


def panel_queries(folder: Path = DASHBOARDS) -> list[PanelQuery]:
    """All queries of the committed dashboards."""
    queries = []
    for file in sorted(folder.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            field = panel.get("fieldConfig", {}).get("defaults", {})
            bounds = (field.get("min", -math.inf), field.get("max", math.inf))
            name = f"{file.stem} / {panel['title']}"
            queries += [PanelQuery(name, t["expr"], bounds) for t in panel.get("targets", [])]
    return queries


def substituted(expr: str, instance: str = ".*", window: str = "10s") -> str:
    """A panel's expression as Grafana would send it, with all models."""
    values = {"$model_name": ".*", "$instance": instance, "$__rate_interval": window}
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    unknown = re.findall(r"\$\w+", expr)
    assert not unknown, f"{unknown} has no value in {expr}"
    return expr


def without_zero(expr: str) -> str:
    """The expression without the zero that stands in for "never happened"."""
    return expr.replace(" or vector(0)", "")


def api(url: str, path: str, **parameters: str) -> dict[str, Any]:
    """What Prometheus' HTTP API answers, its own errors as an assertion."""
    answer = httpx.get(f"{url}/api/v1/{path}", params=parameters, timeout=30.0, trust_env=False)
    body = answer.json()
    assert body["status"] == "success", f"{parameters}: {body.get('error')}"
    data: dict[str, Any] = body["data"]
    return data


def values(url: str, expr: str) -> list[float]:
    """The values of an expression now, one per series; empty: no data."""
    return [float(sample["value"][1]) for sample in api(url, "query", query=expr)["result"]]


def number_of_rules() -> int:
    """How many rules serving/prometheus/rules.yaml has."""
    return sum(len(group["rules"]) for group in yaml.safe_load(RULES.read_text())["groups"])


def unhealthy_rules(url: str, number: int) -> list[str]:
    """What is wrong with the rules that Prometheus loaded; `number` of them are expected."""
    rules = [rule for group in api(url, "rules")["groups"] for rule in group["rules"]]
    wrong = [f"{rule['name']}: {rule['health']}" for rule in rules if rule["health"] != "ok"]
    return wrong if len(rules) == number else [*wrong, f"{len(rules)} rules, expected {number}"]
