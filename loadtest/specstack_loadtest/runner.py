"""Runs a scenario once against a server, and leaves what came of it in a folder.

The folder then holds requests.jsonl, client.jsonl, metrics.jsonl, server.json, run.json (the
`RunOutcome`) and locust.log. Whatever ends a run early, what was measured until then is kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specstack_loadtest.locust_process import LocustProcess
from specstack_loadtest.progress import Snapshot
from specstack_loadtest.records import kinds_of_errors
from specstack_loadtest.scenario import Scenario
from specstack_loadtest.scenario_file import load_scenario
from specstack_loadtest.scrape import Scraper, latest_gauge, server_facts
from specstack_loadtest.server import Served, base_url, check_address, flush_cache, identify
from specstack_loadtest.shares import Clock
from specstack_loadtest.tail import LOAD_FILE, join_files
from specstack_loadtest.watch import Watch

LOG = "locust.log"
WRITTEN = (
    "requests*.jsonl",
    "client*.jsonl",
    "metrics.jsonl",
    "server.json",
    "run.json",
    LOAD_FILE,
)
LOOK_S = 0.25
START_S = 90.0
"""How long Locust and its workers may take to begin."""


class LoadFailed(RuntimeError):
    """Locust could not begin; the text has the end of its log."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run went."""

    complete: bool
    """Every request that the scenario asks for was sent and ended, well or not."""
    reason: str
    """Why it is not complete; else empty."""
    interrupted: bool
    """By the user."""
    epoch: float
    """When the load began: seconds since 1970."""
    seconds: float
    """From then to the end of the last request."""
    num_requests: int
    num_errors: dict[str, int]
    """By kind."""
    num_workers: int
    url: str
    model: str
    dialect: str
    opt_out: bool
    cache_flushed: bool
    """Whether the server's prefix cache was emptied before."""


def run_once(
    scenario_path: Path,
    url: str,
    folder: Path,
    *,
    num_workers: int = 1,
    opt_out: bool = False,
    allow_remote: bool = False,
    model: str | None = None,
    on_progress: Callable[[Snapshot], None] = lambda snapshot: None,
) -> RunOutcome:
    """Run a scenario; files of a run that was there before are replaced.

    Args:
        num_workers: processes that send, on this machine.
        opt_out: ask a specstack server not to speculate.
        model: which one, of a server with several.
        on_progress: called a few times a second.

    Raises:
        SpecError: the scenario is wrong.
        RemoteRefused, ServerUnusable, OptOutUnknown: the server cannot be used; nothing was sent.
        LoadFailed: Locust did not begin.
    """
    check_address(url, allow_remote)
    scenario = load_scenario(str(scenario_path))
    served = identify(url, model)
    if opt_out:
        served.require_opt_out()
    folder = folder.resolve()
    _clear(folder)
    _write(folder / "server.json", server_facts(url))
    options = _options(scenario_path, url, folder, served, opt_out, allow_remote)
    cache_flushed = flush_cache(url, served.dialect)
    locust = LocustProcess(options, num_workers, folder / LOG)
    early, interrupted = "", False
    try:
        with locust:
            early = _follow(locust, scenario, url, folder, on_progress)
    except KeyboardInterrupt:
        early, interrupted = "interrupted", True
    state = _state(folder)
    records = join_files(folder)
    (folder / LOAD_FILE).unlink(missing_ok=True)
    early = early or _faults(state)
    outcome = RunOutcome(
        complete=not early,
        reason=early,
        interrupted=interrupted,
        epoch=state["epoch"],
        seconds=max((record.end_s for record in records), default=0.0),
        num_requests=len(records),
        num_errors=kinds_of_errors(records),
        num_workers=num_workers,
        url=base_url(url),
        model=served.model,
        dialect=served.dialect,
        opt_out=opt_out,
        cache_flushed=cache_flushed,
    )
    _write(folder / "run.json", asdict(outcome))
    return outcome


def _clear(folder: Path) -> None:
    """Make the folder, without the files of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in WRITTEN:
        for old in folder.glob(pattern):
            old.unlink()


def _options(
    scenario_path: Path, url: str, folder: Path, served: Served, opt_out: bool, allow_remote: bool
) -> list[str]:
    return [
        "--host", base_url(url), "--scenario", str(scenario_path.resolve()),
        "--record-to", str(folder), "--model", served.model, "--dialect", served.dialect,
        *(["--opt-out"] if opt_out else []), *(["--allow-remote"] if allow_remote else []),
    ]  # fmt: skip


def _follow(
    locust: LocustProcess,
    scenario: Scenario,
    url: str,
    folder: Path,
    on_progress: Callable[[Snapshot], None],
) -> str:
    """Scrape and report until the load has ended; returns why it ended early, if it did.

    Raises:
        LoadFailed: it did not begin.
    """
    clock = _wait_for_epoch(locust, folder)
    watch = Watch(scenario, folder)
    with closing(Scraper(url, folder / "metrics.jsonl", clock)) as scraper:
        scraper.start()
        while (code := locust.exit_code) is None:
            budget = latest_gauge(scraper.latest, "_draft_budget")
            on_progress(watch.look(clock(), budget))
            if watch.is_server_gone:
                return f"the server at {url} was gone: no request could connect any more"
            time.sleep(LOOK_S)
    return "" if code == 0 else f"Locust ended with code {code}: see {LOG}"


def _wait_for_epoch(locust: LocustProcess, folder: Path) -> Clock:
    deadline = time.monotonic() + START_S
    while not (folder / LOAD_FILE).exists():
        if locust.exit_code is not None or time.monotonic() > deadline:
            raise LoadFailed(f"Locust did not begin:\n{locust.last_words()}")
        time.sleep(0.05)
    return Clock(_state(folder)["epoch"])


def _state(folder: Path) -> dict[str, Any]:
    """What Locust said of the run; it may have been stopped before it began."""
    try:
        state: dict[str, Any] = json.loads((folder / LOAD_FILE).read_text("utf-8"))
    except FileNotFoundError:
        return {"epoch": time.time(), "workers": [], "done": [], "bugs": []}
    return state


def _faults(state: dict[str, Any]) -> str:
    """What went wrong in the client, if anything did."""
    missing = sorted(set(state["workers"]) - set(state["done"]))
    if missing:
        return f"worker {', '.join(map(str, missing))} ended early: see {LOG}"
    return f"the client failed: {state['bugs'][0]}: see {LOG}" if state["bugs"] else ""


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
