"""Changes to a running scheduler: commands of `/specstack`, the same on every rank.

The HTTP process has validated a command before it gets here, but anybody whom SGLang lets update
its internal state can write one: `check` refuses what would end the scheduler. What can still go
wrong (a table that cannot be fitted) is answered by the command's number in `state`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from specstack.budget.controller import Policies
from specstack.budget.cost_store import save_table
from specstack.budget.cost_table import CostKey, CostTableError
from specstack_dsl.parts import catalogue
from specstack_serving.reporting import RoundReporter

logger = logging.getLogger(__name__)

COMMAND_PREFIX = "specstack:"
"""Of the keys that carry commands. SGLang's messages give keys text and values numbers alone, so
the command is in the key."""


def command_key(command: Mapping[str, Any]) -> str:
    """The key that carries a command."""
    return COMMAND_PREFIX + json.dumps(command)


class CommandHandlers(dict[str, Any]):
    """The engine's handlers of state updates, and ours for all keys with the prefix."""

    def __init__(self, handlers: Mapping[str, Any], own: Any) -> None:
        super().__init__(handlers)
        self._own = own

    def __missing__(self, key: str) -> Any:
        if key.startswith(COMMAND_PREFIX):
            return self._own
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As the engine looks them up."""
        return self[key] if key in self or key.startswith(COMMAND_PREFIX) else default


class CommandError(ValueError):
    """What is no command."""


class Control:
    """Obeys commands `{"number": n, <what>: <value>}`."""

    def __init__(
        self,
        reporter: RoundReporter,
        cost_key: CostKey,
        policies_of: Callable[[dict[str, Any]], Policies],
        *,
        max_draft_budget: int,
        is_first_rank: bool,
    ) -> None:
        """Act on a reporter's controller.

        Args:
            policies_of: makes the policies of a budget as a command carries it.
            max_draft_budget: of the plan's shapes.
            is_first_rank: the one that stores tables.
        """
        self.reporter = reporter
        self._cost_key = cost_key
        self._policies_of = policies_of
        self._max_draft_budget = max_draft_budget
        self._is_first_rank = is_first_rank
        self._last: dict[str, Any] = {}

    def check(self, key: str) -> dict[str, Any]:
        """Return the command of a key; raises CommandError for what cannot be obeyed."""
        try:
            command = json.loads(key.removeprefix(COMMAND_PREFIX))
            int(command["number"])
            if "force" in command:
                self._check_force(command["force"], command["seconds"])
            if "budget" in command:
                self._check_budget(command["budget"])
            if "fit" in command:
                str(command["fit"]["command"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommandError(f"no command of specstack: {error!r}") from None
        return dict(command)

    def _check_force(self, budget: int | None, seconds: float | None) -> None:
        if budget is not None and not 0 <= int(budget) <= self._max_draft_budget:
            raise ValueError(f"force {budget}: at most {self._max_draft_budget}")
        if seconds is not None and not float(seconds) > 0:
            raise ValueError(f"seconds {seconds}")

    def _check_budget(self, budget: dict[str, Any]) -> None:
        known = {part.implementation for part in catalogue()["budget"].values()}
        for part in (budget["budget"], budget["shadow"]):
            if part is not None and part["implementation"] not in known:
                raise ValueError(
                    f"{part['implementation']} is no budget policy of this installation"
                )
        dict(budget["info"])
        self._policies_of(budget)

    def obey(self, key: str) -> None:
        """Run a command that was checked; its answer is in `state` afterwards."""
        command, controller = self.check(key), self.reporter.controller
        answer: dict[str, Any] = {"number": command["number"]}
        if "force" in command:
            controller.force(command["force"], command["seconds"])
        if "budget" in command:
            controller.use(self._policies_of(command["budget"]))
            self.reporter.exporter.identify(command["budget"]["info"])
        if command.get("samples") == "clear":
            controller.costs.clear_samples()
            controller.forget()
        if "fit" in command:
            answer |= self._fit(command["fit"]["command"])
        self._last = answer

    def _fit(self, source: str) -> dict[str, Any]:
        """Make a table of what was measured, use it, and forget the drafts of the measurement."""
        controller = self.reporter.controller
        try:
            table = controller.costs.fit(self._cost_key, source)
        except CostTableError as error:
            return {"error": str(error)}
        controller.costs.use(table)
        controller.forget()
        if not self._is_first_rank:
            return {"path": None}
        try:
            return {"path": str(save_table(table))}
        except OSError as error:
            logger.warning("specstack: the cost table is in use, but was not stored: %s", error)
            return {"path": None, "not_stored": str(error)}

    @property
    def state(self) -> dict[str, Any]:
        """Status and the answer to the last command, JSON."""
        return {**self.reporter.controller.status, "answer": self._last}
