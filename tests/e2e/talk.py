"""Questions to a server under test, and what it says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from specstack.metrics.record import RoundRecord
from specstack.metrics.trace import read_trace

ADMIN = {"Authorization": "Bearer secret"}
QUESTIONS = (
    "Natalia sold 48 clips in April, and half as many in May. How many clips did she sell?",
    "Write a Python class Stack with push, pop and peek.",
    "List ten animals, one per line.",
    "Explain what a hash table is.",
)


@dataclass(frozen=True)
class Server:
    url: str
    trace: Path

    def post(self, body: Any, **kwargs: Any) -> httpx.Response:
        kwargs = {"headers": ADMIN, "timeout": 60.0, **kwargs}
        return httpx.post(f"{self.url}/specstack/budget", json=body, **kwargs)

    def use(self, body: Any) -> dict[str, Any]:
        answer = self.post(body)
        assert answer.status_code == 200, answer.text
        status: dict[str, Any] = answer.json()
        return status

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"{self.url}/specstack/status", timeout=60.0).json()
        return status

    def records(self) -> list[RoundRecord]:
        return list(read_trace(self.trace)[1])

    def ask(self, question: str, max_tokens: int = 96, **params: Any) -> dict[str, Any]:
        body = {
            "text": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
            "sampling_params": {
                "temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True, **params,
            },
        }  # fmt: skip
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=300.0)
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply

    def metrics(self) -> dict[str, float]:
        """Sums over the labels of every family of ours."""
        sums: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60.0).text.splitlines():
            if line.startswith("specstack_"):
                name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
                sums[name] = sums.get(name, 0.0) + value
        return sums
