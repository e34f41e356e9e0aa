"""The file for `locust -f`: a scenario, headless or in Locust's web interface, also distributed.

    locust -f loadtest/specstack_loadtest/locustfile.py --scenario chat-steady \\
        --host http://127.0.0.1:30000
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Locust puts this folder first while it loads this file, and removes the first entry afterwards.
# The folder is a package: its modules must not stand in for others of the same name.
if sys.path[0] == os.path.dirname(__file__):
    sys.path[0] = os.path.dirname(sys.path[0])

import gevent
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from specstack_dsl.errors import SpecError
from specstack_loadtest.client import ChatClient
from specstack_loadtest.locust_process import end_with_starter
from specstack_loadtest.scenario import Scenario
from specstack_loadtest.scenario_file import load_scenario
from specstack_loadtest.server import (
    DIALECTS,
    Served,
    ServerUnusable,
    check_address,
    identify,
)
from specstack_loadtest.shape import ScenarioShape
from specstack_loadtest.shares import Clock, Start
from specstack_loadtest.user import ChatUser, WorkerLoad, time_limit

START = "specstack_start"
"""Message to a worker: its `Start`."""


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Options of ours, beside Locust's."""
    add = parser.add_argument
    # fmt: off
    add("--scenario", default="smoke", metavar="NAME|FILE", env_var="SPECSTACK_SCENARIO",
        help="What is asked, and when: a shipped scenario or a file (SPECSTACK_SCENARIO)")
    add("--record-to", metavar="DIR", include_in_web_ui=False,
        help="Folder for a record of every request")
    add("--allow-remote", action="store_true", include_in_web_ui=False,
        help="Send load to a server that is not on this machine")
    add("--opt-out", action="store_true", include_in_web_ui=False,
        help="Ask the server not to speculate")
    add("--model", include_in_web_ui=False,
        help="Which model, of a server with several; default: the only one")
    add("--dialect", choices=DIALECTS, include_in_web_ui=False,
        help="Of the API; default: as the server says")
    # fmt: on


@events.init.add_listener
def attach(environment: Environment, **_: object) -> None:
    """Take part in the runs of this process, as its leader, as a worker, or as both."""
    end_with_starter()
    try:
        scenario_of(environment)
    except SpecError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    runner, listeners = environment.runner, environment.events
    assert runner is not None
    gevent.signal_handler(signal.SIGTERM, runner.quit)  # Locust's comes after a headless run
    told: list[Start] = []
    if isinstance(runner, WorkerRunner):
        runner.register_message(START, lambda msg, **_: told.append(Start.of(msg.data)))
    else:
        shape_of(environment).attach(environment, lambda: scenario_of(environment))

    def on_start(**_: object) -> None:
        with refusing(environment):
            if isinstance(runner, MasterRunner):
                lead(environment, runner)
            elif isinstance(runner, LocalRunner):
                served_by(environment)
                begin(environment, shape_of(environment).begin(folder_of(environment))["local"])
            elif told:  # else it came too late to have a share
                begin(environment, told.pop())

    def on_stopping(**_: object) -> None:
        if ChatUser.load is not None:
            ChatUser.load.stop_sending()

    def on_stop(**_: object) -> None:
        if ChatUser.load is not None:
            ChatUser.load.close()
            ChatUser.load = None
        shape_of(environment).end()

    listeners.test_start.add_listener(on_start)
    listeners.test_stopping.add_listener(on_stopping)
    listeners.test_stop.add_listener(on_stop)


def scenario_of(environment: Environment) -> Scenario:
    """The scenario that is asked for now.

    Raises:
        SpecError: it is wrong.
    """
    return load_scenario(options_of(environment).scenario)


def options_of(environment: Environment) -> Any:
    """The command line; the master's, once it has sent it to its workers."""
    assert environment.parsed_options is not None
    return environment.parsed_options


def folder_of(environment: Environment) -> Path | None:
    """Where records go."""
    name = options_of(environment).record_to
    return None if name is None else Path(name)


def shape_of(environment: Environment) -> ScenarioShape:
    """The one of this process."""
    assert isinstance(environment.shape_class, ScenarioShape)
    return environment.shape_class


@contextmanager
def refusing(environment: Environment) -> Iterator[None]:
    """Let Locust end the run where it cannot begin, with the reason in its log."""
    try:
        yield
    except (ValueError, OSError, ServerUnusable) as error:
        environment.process_exit_code = 1
        raise StopTest(str(error)) from None


def served_by(environment: Environment) -> Served:
    """What is there to be loaded.

    Raises:
        RemoteRefused, ServerUnusable: it may not, or cannot.
    """
    options = options_of(environment)
    if not environment.host:
        raise ServerUnusable("no server: give its URL with --host")
    check_address(environment.host, options.allow_remote)
    if options.model and options.dialect:
        return Served(options.model, options.dialect)
    served = identify(environment.host, options.model)
    return Served(served.model, options.dialect or served.dialect)


def lead(environment: Environment, master: MasterRunner) -> None:
    """Tell all workers which part they have, and when the load starts."""
    served_by(environment)
    for worker, start in shape_of(environment).begin(folder_of(environment)).items():
        master.send_message(START, asdict(start), worker)


def begin(environment: Environment, start: Start) -> None:
    """Make this worker's part ready; its users wait for the epoch.

    Raises:
        ValueError, OSError, ServerUnusable: it cannot be made ready.
    """
    options, clock, scenario = options_of(environment), Clock(start.epoch), scenario_of(environment)
    client = ChatClient(
        environment.host or "", served_by(environment), scenario.timeout_s,
        now=clock, opt_out=options.opt_out, time_limit=time_limit,
        interruption=gevent.GreenletExit,
    )  # fmt: skip
    folder = folder_of(environment)
    ChatUser.load = WorkerLoad(environment, scenario, start, clock, client, folder)
