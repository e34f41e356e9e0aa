"""One process or several (torchrun): sums over all of them, and a sharded head.

Several processes share the gradient through FSDP (`fully_shard`); each takes its part of every
batch. Letters: none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from specstack.training.errors import RunError


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this one writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Let all processes arrive here."""
        if self.size > 1:
            distributed.barrier()

    def shard(self, module: nn.Module) -> None:
        """Distribute the weights of a module; its forward must be called through itself."""
        if self.size > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(module)

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1:
            distributed.destroy_process_group()


def start(device: str, batch_size: int) -> Processes:
    """Join the processes that torchrun started, if it did.

    Raises:
        RunError: the device is missing, or the batch cannot be shared.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if batch_size % size:
        raise RunError(f"optimiser.batch_size {batch_size} cannot be shared among {size} processes")
    if device == "cuda" and not torch.cuda.is_available():
        raise RunError("device cuda: this machine has no GPU that torch can use")
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else None
    if place is not None:
        torch.cuda.set_device(place)
    if size > 1:
        distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    return Processes(int(os.environ.get("RANK", "0")), size, place or torch.device("cpu"))


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be distributed; all processes must ask."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()
