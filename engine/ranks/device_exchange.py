"""How ranks on devices exchange columns: torch.distributed gathers them, by NCCL on CUDA, or by Gloo on the CPU, where
that is for tests.

Its backends are made here without their usual surroundings, which would import torch's compiler. They find each other
by a file without a name, which all ranks have, and talk over the loopback interface until NCCL knows a faster way.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from engine.weights.rank_group import RankGroup

__all__ = ["new_meeting_place", "open_device_group"]

_TIMEOUT = timedelta(minutes=30)  # until all ranks have started
_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "=lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the end of a rank is noticed by `engine.ranks.processes`
}
"""Variables of the environment that are set unless they are."""


def new_meeting_place() -> int:
    """Returns the descriptor of a file by which ranks find each other. It ends with the last process that has it."""
    return os.memfd_create("twostep-ranks", os.MFD_CLOEXEC)


def open_device_group(descriptor: int, rank: int, size: int, device: torch.device) -> RankGroup:
    """Returns the group of a rank on its device, once all ranks have met at the file behind the descriptor."""
    return RankGroup(rank, size, DeviceExchange(descriptor, rank, size, device), device)


class DeviceExchange:
    """Implements `engine.weights.rank_group.Exchange` for tensors on a device."""

    def __init__(self, descriptor: int, rank: int, size: int, device: torch.device) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        self.rank, self.size = rank, size
        self._is_aborted = False
        # It opens the file again and again, as long as this process lives.
        store = c10d.FileStore(f"/proc/self/fd/{os.dup(descriptor)}", size)
        self._backend = _nccl(store, rank, size, device) if device.type == "cuda" else _gloo(store, rank, size)
        self._options = c10d.AllgatherOptions()
        self._options.asyncOp = False

    def gather(self, starts: Sequence[int]) -> "DeviceGather":
        return DeviceGather(self, starts)

    def gather_bytes(self, own: Tensor) -> Tensor:
        """Returns the bytes [size * n] of all ranks, rank by rank, of which `own` [n] are this one's. All ranks call it
        together. On CUDA nothing waits but what the stream computes next, so a graph can hold it."""
        if self._is_aborted:
            raise RuntimeError("the ranks have been given up, since one of them failed")
        gathered = own.new_empty(self.size * len(own))
        if len(own):
            work = self._backend._allgather_base(gathered, own, self._options)
            if work is not None:
                work.wait()
        return gathered

    def abort(self) -> None:
        self._is_aborted = True
        self._backend.abort()


class DeviceGather:
    """Implements `engine.weights.rank_group.Gather`. A gather takes as much of each rank: narrower ones fill up."""

    def __init__(self, exchange: DeviceExchange, starts: Sequence[int]) -> None:
        widths = [end - start for start, end in pairwise(starts)]
        if len(widths) != exchange.size or starts[0] != 0 or min(widths) < 0:
            raise RuntimeError("each rank's columns begin where those of the one before end")
        self._exchange, self._widths, self._widest = exchange, widths, max(widths)

    def run(self, x: Tensor) -> Tensor:
        width = self._widths[self._exchange.rank]
        if x.dim() != 2 or x.shape[1] != width:
            raise RuntimeError(f"rows {[*x.shape]} do not have this rank's {width} columns")
        own = torch.nn.functional.pad(x, (0, self._widest - width)) if width < self._widest else x.contiguous()
        gathered = self._exchange.gather_bytes(own.view(-1).view(torch.uint8)).view(x.dtype)
        parts = gathered.view(len(self._widths), len(x), self._widest)
        return torch.cat([part[:, :each] for part, each in zip(parts, self._widths, strict=True)], dim=1)


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    backend = c10d.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)  # waits for the other ranks
    return backend


def _gloo(store: Any, rank: int, size: int) -> Any:
    return c10d.ProcessGroupGloo(store, rank, size, _TIMEOUT)
