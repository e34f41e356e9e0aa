"""Changes to a running scheduler: commands of `/specstack`, the same on every rank.

The HTTP process has validated a command before it gets here; what can still go wrong (a table that
cannot be fitted) is answered by the command's number in `state`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from specstack.budget.controller import Policies
from specstack.budget.cost_store import save_table
from specstack.budget.cost_table import CostKey, CostTableError
from specstack_serving.reporting import RoundReporter

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


class Control:
    """Obeys commands."""

    def __init__(
        self,
        reporter: RoundReporter,
        cost_key: CostKey,
        policies_of: Callable[[dict[str, Any]], Policies],
        *,
        is_first_rank: bool,
    ) -> None:
        """Act on a reporter's controller.

        Args:
            policies_of: makes the policies of a budget as a command carries it.
            is_first_rank: the one that stores tables.
        """
        self.reporter = reporter
        self._cost_key = cost_key
        self._policies_of = policies_of
        self._is_first_rank = is_first_rank
        self._last: dict[str, Any] = {}

    def obey(self, key: str) -> None:
        """Run `{"number": n, <what>: <value>}` of a key; its answer is in `state` afterwards."""
        command = json.loads(key.removeprefix(COMMAND_PREFIX))
        controller = self.reporter.controller
        answer: dict[str, Any] = {"number": command["number"]}
        try:
            if "force" in command:
                controller.force(command["force"])
            if "budget" in command:
                controller.use(self._policies_of(command["budget"]))
            if command.get("samples") == "clear":
                controller.costs.clear_samples()
            if "fit" in command:
                answer["path"] = self._fit(command["fit"])
        except CostTableError as error:
            answer["error"] = str(error)
        self._last = answer

    def _fit(self, options: dict[str, Any]) -> str | None:
        """Make a table of what was measured, use it, and forget the drafts of the measurement."""
        controller = self.reporter.controller
        table = controller.costs.fit(self._cost_key, options["command"])
        controller.costs.use(table)
        controller.forget()
        return str(save_table(table)) if self._is_first_rank else None

    @property
    def state(self) -> dict[str, Any]:
        """Status and the answer to the last command, JSON."""
        return {**self.reporter.controller.status, "answer": self._last}
