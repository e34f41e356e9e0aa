"""One worker's part of a run under Locust: users that send, and what they write down.

Closed loop: a user sends one conversation after the other, as long as it has a seat. Open loop: one
user per worker sends every arrival at its time, each in a greenlet of its own, whatever became of
those before. This module imports Locust, which patches the process: only its processes may.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, TextIO

import gevent
import httpx
from gevent.event import Event
from gevent.pool import Group
from locust import User, task
from locust.env import Environment

from specstack_loadtest.answers import end_to_end_s, tpot_s, ttft_s
from specstack_loadtest.arrivals import Phase
from specstack_loadtest.client import ChatClient, Errand
from specstack_loadtest.records import CANCELLED, RequestRecord
from specstack_loadtest.saturation import sample_client
from specstack_loadtest.scenario import Closed, Scenario
from specstack_loadtest.shares import Arrival, Clock, ClosedShare, Start, next_change_s, open_share
from specstack_loadtest.workload import Conversation, Workload

DONE = "specstack_done"
"""Message of a worker whose share is done."""
POLL_S = 0.05
"""How often a user without a seat looks for one."""
PAUSE_S = 1.0
"""Of a closed loop's user after an error: a server that refuses at once is not hammered."""
SPIN_S = 0.0015
"""How long before its time a request is waited for without sleep, which ends a millisecond late."""


class RequestFailed(Exception):
    """What Locust's statistics count an error by."""


class WorkerLoad:
    """What one worker does, from the start message to its last answer."""

    def __init__(
        self,
        environment: Environment,
        scenario: Scenario,
        start: Start,
        clock: Clock,
        client: ChatClient,
        folder: Path | None,
    ) -> None:
        """Make everything ready; nothing is sent before a user's first `step`.

        Args:
            clock: that of `start` and of the client.
            folder: where records and samples go; None: nowhere.

        Raises:
            ValueError, OSError: a file of the scenario cannot be read.
        """
        self._environment = environment
        self._start = start
        self._clock = clock
        self._client = client
        self._workload = Workload(scenario)
        self._closed = ClosedShare(scenario, start)
        is_closed = isinstance(scenario.arrivals, Closed)
        self._arrivals = None if is_closed else iter(open_share(scenario, start))
        self._num_in_flight = 0
        self._is_done = False
        self._stopping = Event()
        self._records = _file(folder, f"requests-{start.worker}.jsonl")
        self._samples = _file(folder, f"client-{start.worker}.jsonl")
        self._sampler = None if self._samples is None else gevent.spawn(
            sample_client, self._samples, start.worker, clock, lambda: self._num_in_flight,
            gevent.sleep,
        )  # fmt: skip

    def stop_sending(self) -> None:
        """Send nothing more; what is in flight goes on."""
        self._stopping.set()

    def close(self) -> None:
        """Close files and connections, after the last request."""
        if self._sampler is not None:
            self._sampler.kill()
        for file in (self._records, self._samples):
            if file is not None:
                file.close()
        self._client.close()

    def step(self) -> None:
        """What a user does next; returns so that Locust can stop it in between."""
        if (before_s := self._clock()) < 0:
            self._stopping.wait(-before_s)
        elif self._stopping.is_set() or self._is_done:
            gevent.sleep(POLL_S)
        elif self._arrivals is None:
            self._closed_step()
        else:
            self._send_arrivals(self._arrivals)

    def _closed_step(self) -> None:
        """One conversation, if there is a seat and a conversation; else a short wait."""
        now_s = self._clock()
        taken = self._closed.take(now_s)
        if taken is None:
            if self._closed.is_done(now_s):
                self._say_done()
            change_s = next_change_s(self._closed.phases, now_s)
            gevent.sleep(POLL_S if change_s is None else min(POLL_S, change_s - now_s))
            return
        try:
            phase, index = taken
            conversation = self._workload.request(phase.number, index)
            if not self._converse(phase, conversation, self._clock()):
                self._stopping.wait(PAUSE_S)
        finally:
            self._closed.leave()

    def _send_arrivals(self, arrivals: Iterator[Arrival]) -> None:
        """Send every arrival at its time and wait for the answers, unless the run is stopped."""
        in_flight = Group()
        try:
            for arrival in arrivals:
                conversation = self._workload.request(arrival.phase.number, arrival.index)
                if not self._wait_until(arrival.due_s):
                    break
                sender = in_flight.spawn(self._converse, arrival.phase, conversation, arrival.due_s)
                sender.link_exception(self._fail)
                gevent.sleep(0)  # it is sent now, not when the next one has been made
            in_flight.join()
            if not self._stopping.is_set():
                self._say_done()
        finally:
            in_flight.kill()

    def _fail(self, sender: gevent.Greenlet) -> None:
        """Have Locust count a bug of ours, as it does for its users."""
        self._environment.events.user_error.fire(
            user_instance=self, exception=sender.exception, tb=sender.exc_info[2]
        )

    def _converse(self, phase: Phase, conversation: Conversation, due_s: float) -> bool:
        """Send the turns of a conversation; returns whether all that were sent were answered.

        A turn that would be due after the end of its phase is not sent.
        """
        history: list[dict[str, str]] = []
        for number, turn in enumerate(conversation.turns):
            if number > 0:
                due_s += turn.think_s
                is_over = phase.ends_s is not None and due_s >= phase.ends_s
                if is_over or not self._wait_until(due_s):
                    return True
            errand = Errand(
                phase.number, conversation.index, number, self._start.worker,
                phase.is_warmup(conversation.index, due_s), due_s,
            )  # fmt: skip
            self._num_in_flight += 1
            answer = self._client.stream(turn, history, errand)
            self._num_in_flight -= 1
            self._keep(answer.record)
            if answer.record.error == CANCELLED:
                raise gevent.GreenletExit
            if answer.record.error is not None:
                return False
            history += [*turn.messages, {"role": "assistant", "content": answer.content}]
            due_s = answer.record.end_s
        return True

    def _wait_until(self, time_s: float) -> bool:
        """Return at that time, or, with False, when the run is stopped."""
        while (left_s := time_s - self._clock()) > 0:
            if left_s < SPIN_S:
                gevent.sleep(0)
            elif self._stopping.wait(left_s - SPIN_S):
                return False
        return not self._stopping.is_set()

    def _keep(self, record: RequestRecord) -> None:
        if self._records is not None:
            self._records.write(record.as_line() + "\n")
            self._records.flush()
        if record.error != CANCELLED:
            report(self._environment, record)

    def _say_done(self) -> None:
        self._is_done = True
        assert self._environment.runner is not None
        self._environment.runner.send_message(DONE, {"worker": self._start.worker})


def report(environment: Environment, record: RequestRecord) -> None:
    """Count a request in Locust's own statistics, in milliseconds from when it was due."""
    fire = environment.events.request.fire
    failed = None if record.error is None else RequestFailed(record.error)
    took_s: dict[str, float | None] = {"chat": end_to_end_s(record)}
    if record.error is None:
        took_s |= {"ttft": ttft_s(record), "tpot": tpot_s(record)}
    for name, seconds in took_s.items():
        if seconds is None:
            continue
        fire(
            request_type="POST" if name == "chat" else "", name=name,
            response_time=seconds * 1000, response_length=0, exception=failed, context={},
        )  # fmt: skip


def time_limit(seconds: float) -> gevent.Timeout:
    """End a block in time, as the client wants it."""
    return gevent.Timeout(seconds, httpx.ReadTimeout(f"no end after {seconds:g} s"))


def _file(folder: Path | None, name: str) -> TextIO | None:
    return None if folder is None else (folder / name).open("w", encoding="utf-8")


class ChatUser(User):
    """One of Locust's users."""

    load: ClassVar[WorkerLoad | None] = None
    """Of the run that goes on; None: this worker has no part in one."""

    @task
    def step(self) -> None:
        """Do the next thing."""
        if self.load is None:
            gevent.sleep(POLL_S)
        else:
            self.load.step()
