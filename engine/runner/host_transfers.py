"""Finds what makes the host wait for the device, or the device for the host: no CUDA graph can hold it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostTransferError", "NoHostTransfers"]

_READ_BY_THE_HOST = frozenset(
    {"_local_scalar_dense", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select"}
)
"""Operators whose result, or the size of it, depends on numbers that the host has to know."""


class HostTransferError(Exception):
    """An operation moves numbers between the host and the device."""


class NoHostTransfers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises HostTransferError, in its context, at the first operation that moves numbers between host and device."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        is_sized = name != "repeat_interleave" or (kwargs or {}).get("output_size") is not None
        if name in _READ_BY_THE_HOST or not is_sized or (name.startswith("index") and _has_mask(args)):
            raise HostTransferError(name)
        result = func(*args, **(kwargs or {}))
        devices = {each.device.type for each in (*args, result) if isinstance(each, Tensor) and each.dim()}
        if len(devices) > 1 and name in ("copy_", "_to_copy"):
            raise HostTransferError(name)
        return result


def _has_mask(args: Sequence[Any]) -> bool:
    """Whether one of the indices among an operator's arguments is a mask, of which the device counts the numbers."""
    lists = (each for each in args if isinstance(each, (list, tuple)))
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for each in lists for index in each
    )
