"""Measures the machine's roofline: memory bandwidth and matmul speed. It takes most of a second per loaded model."""

import functools
import time
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from engine.core.machine import Ceilings
from engine.host.available_memory import available_bytes
from engine.host.cpu_caches import all_caches_bytes, largest_cache_bytes
from engine.host.huge_pages import empty_in_huge_pages
from engine.kernels.cpu_features import has_native_bf16
from engine.weights.packing_policy import packing_for

__all__ = ["matmul_dtype", "measure_again", "measure_ceilings"]

_MIN_READ_BYTES = 1 << 16
_MAX_READ_BYTES = 1 << 30  # more than caches hold
_NUM_CACHES = 8  # on a CPU, so many times what its largest caches hold is enough: more takes long to write
_MEMORY_SHARE = 0.1  # of what is available, which that may take at most
_MIN_MATRIX_SIZE = 256
_MAX_MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
_RUN_S = 0.005  # a matmul that takes so long is large enough
_MIN_GROWTH = 4  # and so many times what one of half the size takes, which has an eighth of the work
_BUDGET_S = 0.1  # of each measurement, after a first run
_DOUBTFUL_RATIO = 1.5  # of two measurements of the same

_PIECE_ELEMENTS = 1 << 23  # of memory that is written at a time before it is read

Matmul = Callable[[], Tensor]


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, weight_bytes: int, quantization: str = "none"
) -> Ceilings:
    """Measures how fast the machine reads memory and multiplies matrices.

    Reads as many bytes as a step reads, so that the ceiling of small models, whose weights stay in the CPU's caches, is
    the bandwidth of these. Multiplies by torch, and with a `quantization`, on the CPU, by the kernels, too: the faster
    one counts. Reads before and after that: where these two differ much, something else was busy.
    """
    read = _reading(device, weight_bytes)
    read_speeds = [_read_speed(read, device)]
    plain = matmul_dtype(device, dtype)
    plain_speed = _flops_per_s(device, functools.partial(_plain_matmul, device, plain))
    speeds = {str(plain).removeprefix("torch."): plain_speed}
    if quantization != "none" and device.type == "cpu":  # a GPU multiplies numbers of 16 bits all the same
        speeds[quantization] = _flops_per_s(device, functools.partial(_quantized_matmul, dtype, quantization))
    fastest = max(speeds, key=lambda name: speeds[name])
    reads_cache = device.type == "cpu" and weight_bytes <= largest_cache_bytes()
    read_speeds.append(_read_speed(read, device))
    is_in_doubt = max(read_speeds) > _DOUBTFUL_RATIO * min(read_speeds)
    ceilings = Ceilings(max(read_speeds), speeds[fastest], fastest, reads_cache, is_in_doubt)
    del read
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the KV cache takes what is free
    return ceilings


def measure_again(
    before: Ceilings, dtype: torch.dtype, weight_bytes: int, is_wanted: Callable[[], bool]
) -> Ceilings | None:
    """Measures the same as `before` on the CPU, beside a loaded model: without reading memory where it is short. Gives
    up, and returns None, within some milliseconds once the process `is_wanted` for something else."""
    try:
        return _measured_again(before, dtype, weight_bytes, is_wanted)
    except _WantedError:
        return None


class _WantedError(Exception):
    """A measurement is given up."""


def _unless(is_wanted: Callable[[], bool], run: Matmul) -> Matmul:
    """Returns what runs the same, or raises _WantedError instead."""

    def run_unless_wanted() -> Tensor:
        if is_wanted():
            raise _WantedError
        return run()

    return run_unless_wanted


def _measured_again(before: Ceilings, dtype: torch.dtype, weight_bytes: int, is_wanted: Callable[[], bool]) -> Ceilings:
    cpu = torch.device("cpu")
    own, name = str(dtype).removeprefix("torch."), before.dtype
    if name in (own, "float32"):
        matmul_of = functools.partial(_plain_matmul, cpu, getattr(torch, name))
    else:
        matmul_of = functools.partial(_quantized_matmul, dtype, name)
    flops_per_s = _flops_per_s(cpu, lambda size: _unless(is_wanted, matmul_of(size)))
    if _read_bytes(cpu, weight_bytes) > _MEMORY_SHARE * available_bytes(cpu):
        return msgspec.structs.replace(before, flops_per_s=flops_per_s)
    memory = _reading(cpu, weight_bytes, is_wanted)
    read_bytes_per_s = memory.nbytes / _best_seconds(_unless(is_wanted, memory.sum), cpu, _BUDGET_S / 2)
    return msgspec.structs.replace(
        before, flops_per_s=flops_per_s, read_bytes_per_s=read_bytes_per_s, is_in_doubt=False
    )


def matmul_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to measure matmuls in: float32 on a CPU that does not multiply bfloat16, else `dtype`.

    On such a CPU torch's bfloat16 has a hundredth of the speed of float32, which the kernels can reach at best.
    """
    return torch.float32 if device.type == "cpu" and not has_native_bf16() else dtype


def _reading(device: torch.device, weight_bytes: int, is_wanted: Callable[[], bool] = lambda: False) -> Tensor:
    """Returns memory to read, as large as the weights, if these are not much larger than caches."""
    num_elements = _read_bytes(device, weight_bytes) // torch.float32.itemsize
    memory = empty_in_huge_pages((num_elements,), torch.float32, device)  # packed weights use such pages, too
    for start in range(0, num_elements, _PIECE_ELEMENTS):
        _unless(is_wanted, functools.partial(memory[start : start + _PIECE_ELEMENTS].fill_, 1))()
    return memory


def _read_speed(memory: Tensor, device: torch.device) -> float:
    """Measures bytes per second."""
    return memory.nbytes / _best_seconds(memory.sum, device, _BUDGET_S / 2)


def _read_bytes(device: torch.device, weight_bytes: int) -> int:
    of_caches = _NUM_CACHES * all_caches_bytes() if device.type == "cpu" else 0
    return max(_MIN_READ_BYTES, min(weight_bytes, of_caches or _MAX_READ_BYTES, _MAX_READ_BYTES))


def _plain_matmul(device: torch.device, dtype: torch.dtype, size: int) -> Matmul:
    return functools.partial(torch.matmul, *torch.randn(2, size, size, device=device).to(dtype))


def _quantized_matmul(dtype: torch.dtype, quantization: str, size: int) -> Matmul:
    weight, rows = torch.randn(2, size, size).to(dtype)
    return functools.partial(packing_for(quantization, kernels_available=True).layers(weight).multiply, rows, None)


def _flops_per_s(device: torch.device, matmul_of: Callable[[int], Matmul]) -> float:
    """Measures multiplications and additions per second, of square matrices as large as time allows.

    On a busy machine a small one may take long and only wait, for a thread whose CPU another program has. Such a wait
    does not grow with the work, so a size is large enough once its time does.
    """
    size, multiply, is_enough = _MIN_MATRIX_SIZE, matmul_of(_MIN_MATRIX_SIZE), False
    seconds = _best_seconds(multiply, device, _RUN_S)
    while not is_enough and size < _MAX_MATRIX_SIZE[device.type]:
        size *= 2
        multiply = matmul_of(size)
        half_seconds, seconds = seconds, _best_seconds(multiply, device, _RUN_S)
        is_enough = seconds >= max(_RUN_S, _MIN_GROWTH * half_seconds)
    return 2 * size**3 / min(seconds, _best_seconds(multiply, device, _BUDGET_S))


def _best_seconds(run: Matmul, device: torch.device, budget_s: float) -> float:
    """Returns the shortest time of the runs that fit into the budget, after a first one, which warms up."""
    _seconds(run, device)
    times = [_seconds(run, device)]
    while sum(times) < budget_s:
        times.append(_seconds(run, device))
    return min(times)


def _seconds(run: Matmul, device: torch.device) -> float:
    started_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
