"""Copies what a step needs of the host's numbers to a device, all at once and without waiting for it."""

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["upload"]

_ALIGNMENT = 16  # bytes, as kernels expect of their pointers


def upload(arrays: Mapping[str, NDArray[np.generic]], device: torch.device) -> dict[str, Tensor]:
    """Returns tensors of the same names, shapes and types on the device. They are views of one copy, which starts from
    pinned memory: torch keeps that until the copy has ended."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    starts = list(accumulate(sizes, initial=0))
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    parts = buffer.numpy()
    for array, start in zip(arrays.values(), starts, strict=False):
        parts[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = buffer.to(device, non_blocking=True)
    return {
        name: copied[start : start + array.nbytes].view(_dtype_of(array)).view(array.shape)
        for (name, array), start in zip(arrays.items(), starts, strict=False)
    }


def _dtype_of(array: NDArray[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
