"""AdamW, its learning rate, and which weights move when.

A frozen group has rate 0: its moments go on, its weights do not. Matrices decay, vectors do not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from specstack.training.processes import full
from specstack.training.run_config import Optimiser, Schedule
from specstack.training.run_head import group_of

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def rate_share(step: int, num_steps: int, warmup_share: float, min_share: float) -> float:
    """Share of the largest rate at a step (from 0): a linear rise, then a cosine to `min_share`."""
    num_warmup = max(1, round(warmup_share * num_steps))
    if step < num_warmup:
        return (step + 1) / num_warmup
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    return min_share + (1 - min_share) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def falling(step: int, num_steps: int, end_share: float) -> float:
    """1 at the start, falling linearly to 0 at `end_share` of the steps."""
    return max(0.0, 1 - step / max(1.0, end_share * num_steps))


def frozen_groups(schedule: Schedule, step: int, num_steps: int) -> frozenset[str]:
    """Groups that do not move at a step."""
    for stage in schedule.stages:
        if step < stage.until * num_steps:
            return frozenset(stage.freeze)
    return frozenset()


class Optimisation:
    """The optimiser of a module whose head is `module.head`."""

    def __init__(
        self, module: nn.Module, options: Optimiser, schedule: Schedule, num_steps: int
    ) -> None:
        self.module, self.options, self.schedule = module, options, schedule
        self.num_steps = num_steps
        found: dict[tuple[str, bool], list[nn.Parameter]] = {}
        for name, weight in module.named_parameters():
            group = group_of(name.removeprefix("head."))
            found.setdefault((group, weight.ndim > 1), []).append(weight)
        self.groups = [group for group, _ in found]
        self.adamw = torch.optim.AdamW(
            [
                {"params": weights, "weight_decay": options.weight_decay * decays}
                for (_, decays), weights in found.items()
            ],
            lr=options.lr,
            betas=options.betas,
            fused=True,
        )

    def step(self, step: int) -> dict[str, float]:
        """Clip, update, clear; return `lr`, `grad_norm` and the norm of each group."""
        options = self.options
        shares = options.warmup_share, options.min_lr_share
        rate = options.lr * rate_share(step, self.num_steps, *shares)
        frozen = frozen_groups(self.schedule, step, self.num_steps)
        squares: dict[str, float] = dict.fromkeys(self.groups, 0.0)
        live: list[Tensor] = []
        for group, values in zip(self.groups, self.adamw.param_groups, strict=True):
            values["lr"] = 0.0 if group in frozen else rate
            grads = [weight.grad for weight in values["params"] if weight.grad is not None]
            squares[group] += sum(float(full(grad.pow(2).sum())) for grad in grads)
            live += grads if group not in frozen else []
        norm = math.sqrt(sum(squares[group] for group in squares if group not in frozen))
        if norm > options.clip:
            for grad in live:
                grad.mul_(options.clip / norm)
        self.adamw.step()
        self.adamw.zero_grad()
        groups = {f"grad_{group}": math.sqrt(square) for group, square in squares.items()}
        return {"lr": rate, "grad_norm": norm, **groups}

    def state(self) -> dict[str, Any]:
        """The whole state by names of weights, on the CPU; all processes must ask."""
        return get_optimizer_state_dict(self.module, self.adamw, options=_WHOLE)

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state over, whatever number of processes it was saved by."""
        set_optimizer_state_dict(self.module, self.adamw, state, options=_WHOLE)
