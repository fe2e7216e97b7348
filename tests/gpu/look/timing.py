"""Times of work on a device, and what the device can do at most."""

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10, warmups: int = 3) -> float:
    """Returns the median seconds of one run of the work, from its start to the end of all that it launched."""
    for _ in range(warmups):
        work()
    durations = []
    for _ in range(repeats):
        synchronize(device)
        started_s = time.perf_counter()
        work()
        synchronize(device)
        durations.append(time.perf_counter() - started_s)
    return statistics.median(durations)


def read_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Returns the rate at which the device reads memory, by the faster of two sums over it."""
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    rows = numbers.view(-1, 1 << 14)
    seconds = min(seconds_of(numbers.sum, device), seconds_of(lambda: rows.amax(1), device))
    return numbers.nbytes / seconds


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Returns the rate of a copy on the device: of bytes read and bytes written together."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


def product_flops_per_s(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Returns the rate of a product of two square matrices of random numbers."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device)
