"""Follows a scenario's phases, tells workers when the load starts, and ends it when all are done.

Users of a closed loop are the most that a phase had so far, rounded up to a multiple of the
workers: each worker has enough, and none is stopped, which would cut its answer. How many of them
may send is decided in `shares`, to the millisecond. An open loop has one user per worker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gevent
from locust import LoadTestShape
from locust.env import Environment
from locust.runners import STATE_MISSING, MasterRunner

from specstack_loadtest.arrivals import Phase, phases_of
from specstack_loadtest.scenario import Scenario
from specstack_loadtest.shares import Clock, Start, next_change_s, phase_at
from specstack_loadtest.tail import LOAD_FILE
from specstack_loadtest.user import DONE

LEAD_S, DISTRIBUTED_LEAD_S = 1.0, 2.0
"""From the start message to the epoch: workers are ready when the load begins."""
TICK_S = 1.0
"""Locust's."""
GRACE_S = 10.0
"""After the last possible answer; then workers that say nothing are given up."""


@dataclass
class Run:
    """One run, as the process sees it that leads it."""

    scenario: Scenario
    epoch: float
    workers: dict[str, int]
    """Numbers of the workers, by Locust's ids."""
    folder: Path | None
    done: set[int] = field(default_factory=set)
    bugs: list[str] = field(default_factory=list)
    """Exceptions that are none of the server's doing."""

    def __post_init__(self) -> None:
        self.clock = Clock(self.epoch)
        self.phases = phases_of(self.scenario)

    @property
    def phase(self) -> Phase:
        """The one under way; before and after, the first and the last."""
        now_s = self.clock()
        return phase_at(self.phases, now_s) or self.phases[0 if now_s < 0 else -1]

    @property
    def is_overdue(self) -> bool:
        """Whether every request has been answered, or has timed out, long since."""
        ends_s = self.phases[-1].ends_s
        return ends_s is not None and self.clock() > ends_s + self.scenario.timeout_s + GRACE_S

    def write(self) -> None:
        """Say how it stands, in one step."""
        if self.folder is None:
            return
        state = {
            "epoch": self.epoch,
            "workers": sorted(self.workers.values()),
            "done": sorted(self.done),
            "bugs": self.bugs,
        }
        part = self.folder / f"{LOAD_FILE}.part"
        part.write_text(json.dumps(state) + "\n", "utf-8")
        part.replace(self.folder / LOAD_FILE)


class ScenarioShape(LoadTestShape):
    """Leads the runs of this process, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._run: Run | None = None
        self._scenario_of: Callable[[], Scenario] | None = None

    def attach(self, environment: Environment, scenario_of: Callable[[], Scenario]) -> None:
        """Listen to the workers.

        Args:
            scenario_of: what is to be run now; the web interface can change it.
        """
        self._scenario_of = scenario_of
        assert environment.runner is not None
        environment.runner.register_message(DONE, self._on_done)

    def begin(self, folder: Path | None) -> dict[str, Start]:
        """Start the clock of a run; returns what each worker is to be told, by Locust's id."""
        ids = self._worker_ids()
        lead_s = DISTRIBUTED_LEAD_S if isinstance(self.runner, MasterRunner) else LEAD_S
        workers = {worker: number for number, worker in enumerate(ids)}
        run = self._run = Run(self._scenario(), time.time() + lead_s, workers, folder)
        run.write()
        return {worker: Start(run.epoch, number, len(ids)) for worker, number in workers.items()}

    def end(self) -> None:
        """Write down how the run ended, and forget it."""
        if self._run is not None and self.runner is not None:
            self._run.bugs = [str(found["msg"]) for found in self.runner.exceptions.values()]
            self._run.write()
        self._run = None

    def tick(self) -> tuple[int, float] | None:
        """(users, users to start per second); None: the load has ended.

        The last tick before a phase waits for it, so that its users come when it starts.
        """
        run = self._run
        if run is None:  # Locust asks before it starts
            return _users(phases_of(self._scenario())[:1], len(self._worker_ids()))
        if self._all_done(run) or run.is_overdue:
            return None
        change_s, now_s = next_change_s(run.phases, run.clock()), run.clock()
        if change_s is not None and change_s - now_s <= TICK_S:
            gevent.sleep(max(0.0, change_s - now_s))
        return _users(run.phases[: run.phase.number + 1], len(run.workers))

    def _scenario(self) -> Scenario:
        assert self._scenario_of is not None, "not attached"
        return self._scenario_of()

    def _worker_ids(self) -> list[str]:
        """Locust's ids, in the order in which they came."""
        runner = self.runner
        if isinstance(runner, MasterRunner):
            return sorted((c.id for c in runner.clients.ready), key=runner.get_worker_index)
        return ["local"]

    def _all_done(self, run: Run) -> bool:
        """Whether all workers that are still there have said that they are done."""
        there = set(run.workers.values())
        if isinstance(self.runner, MasterRunner):
            clients = self.runner.clients
            there = {
                number for worker, number in run.workers.items()
                if worker in clients and clients[worker].state != STATE_MISSING
            }  # fmt: skip
        return there <= run.done

    def _on_done(self, environment: Environment, msg: Any, **_: object) -> None:
        if self._run is not None:
            self._run.done.add(int(msg.data["worker"]))
            self._run.write()


def _users(phases: Sequence[Phase], num_workers: int) -> tuple[int, float]:
    """(users for phases until now, the same: all start at once)"""
    num_workers = max(1, num_workers)
    most = max(phase.users or 1 for phase in phases)
    users = -(-most // num_workers) * num_workers
    return users, float(users)
