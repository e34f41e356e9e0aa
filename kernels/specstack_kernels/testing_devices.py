"""Ops on a device under tests that know the CPU only.

Storages move whole, so that views stay views: strides, odd addresses, elements that nobody owns,
and tensors that share memory are on the device as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, UntypedStorage

P = ParamSpec("P")
R = TypeVar("R")


def on_device(op: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """Return the op with CPU tensors in and out, computed on `device`.

    What it changes in place is changed in the caller's tensors, and results that share memory with
    an argument do so here. A CPU as device is another copy, which proves as much without a GPU.
    """

    @wraps(op)
    def moved(*args: P.args, **kwargs: P.kwargs) -> R:
        copies = _Copies(device)
        there_args, there_kwargs = copies.there(args), copies.there(kwargs)
        result: R = op(*there_args, **there_kwargs)
        copies.copy_back()
        return copies.here(result)  # type: ignore[no-any-return]

    return moved


class _Copies:
    """Storages of one call, here and there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        """By address here; both are kept, so that no address comes twice."""

    def there(self, value: Any) -> Any:
        return _map_tensors(self._tensor_there, value)

    def here(self, value: Any) -> Any:
        return _map_tensors(self._tensor_here, value)

    def copy_back(self) -> None:
        for here, there in self._pairs.values():
            here.copy_(there)

    def _tensor_there(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        here = tensor.untyped_storage()
        if here.data_ptr() not in self._pairs:
            is_cpu = self._device.type == "cpu"
            there = here.clone() if is_cpu else here.to(device=self._device)
            self._pairs[here.data_ptr()] = here, there
        return _view(tensor, self._pairs[here.data_ptr()][1])

    def _tensor_here(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        for here, there in self._pairs.values():
            if address == there.data_ptr() and address:
                return _view(tensor, here)
        return tensor.cpu()


def _view(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """The same elements of another storage."""
    none = torch.tensor([], dtype=tensor.dtype, device=storage.device)
    return none.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Of lists, tuples, named tuples and the values of dicts, nested."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [_map_tensors(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
