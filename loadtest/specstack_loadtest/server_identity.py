"""What a server said of itself: how many requests it runs at once, and what it is.

`server.json` holds what each kind of server answers, as it came; keys are looked for at any depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CAPS = ("max_running_requests", "max_num_seqs")
"""Keys under which servers say how many requests run at once."""
CAP_PER_REPLICA = "effective_max_running_requests_per_dp"
"""The same in effect, of each data-parallel replica."""
FACTS = (
    "model_path",
    "served_model_name",
    "version",
    "dtype",
    "device",
    "tp_size",
    "attention_backend",
    "max_total_num_tokens",
    "plan_hash",
)
"""Keys that a reader needs to tell one server from another."""


def admission_cap(server: Any) -> int | None:
    """How many requests the server runs at once; None: it does not say."""
    per_replica = _number(server, CAP_PER_REPLICA)
    if per_replica:
        return int(per_replica * (_number(server, "dp_size") or 1))
    found = next((cap for key in CAPS if (cap := _number(server, key))), None)
    return None if found is None else int(found)


def identity(server: Any) -> dict[str, str | int | float]:
    """Those of `FACTS` that it says."""
    found = {key: _find(server, key) for key in FACTS}
    return {key: value for key, value in found.items() if isinstance(value, str | int | float)}


def _number(server: Any, key: str) -> float | None:
    found = _find(server, key)
    return found if isinstance(found, int | float) else None


def _find(data: Any, key: str) -> Any:
    """The first value of that name that is not null, at any depth."""
    if isinstance(data, Mapping):
        if data.get(key) is not None:
            return data[key]
        data = list(data.values())
    if isinstance(data, list | tuple):
        for one in data:
            found = _find(one, key)
            if found is not None:
                return found
    return None
