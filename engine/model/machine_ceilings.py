"""How fast this machine reads memory and multiplies matrices: most of a second, when a model is loaded."""

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.core.machine import Ceilings
from engine.host.huge_pages import empty_in_huge_pages
from engine.kernels.cpu_features import has_native_bf16
from engine.weights.packing_policy import packing_for

__all__ = ["measure_ceilings", "multiplied_as"]

_MIN_READ_BYTES = 1 << 16
_MAX_READ_BYTES = 1 << 30  # more than caches hold
_MIN_MATRIX_SIZE = 256
_MAX_MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
_RUN_S = 0.005  # a matrix product that takes so long is large enough
_BUDGET_S = 0.1  # of each measurement, after a first run

Product = Callable[[], Tensor]


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, weight_bytes: int, quantization: str = "none"
) -> Ceilings:
    """Reads as much as a step reads, so that small models, whose weights stay in the caches, are held to those.

    Multiplies by torch, and by the kernels what has another `quantization` than none: the faster of both counts.
    """
    plain = multiplied_as(device, dtype)
    plain_speed = _matrix_speed(device, functools.partial(_plain_product, device, plain))
    speeds = {str(plain).removeprefix("torch."): plain_speed}
    if quantization != "none":
        speeds[quantization] = _matrix_speed(device, functools.partial(_quantized_product, dtype, quantization))
    fastest = max(speeds, key=lambda name: speeds[name])
    ceilings = Ceilings(_read_speed(device, weight_bytes), speeds[fastest], fastest)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the KV cache takes what is free
    return ceilings


def multiplied_as(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """A CPU that does not multiply bfloat16 does no better than float32, of which torch's bfloat16 has a hundredth."""
    return torch.float32 if device.type == "cpu" and not has_native_bf16() else dtype


def _read_speed(device: torch.device, weight_bytes: int) -> float:
    """Bytes per second."""
    num_elements = _read_bytes(weight_bytes) // torch.float32.itemsize
    buffer = empty_in_huge_pages((num_elements,), torch.float32, device).fill_(1)  # weights lie in such pages, too
    return buffer.nbytes / _best_seconds(buffer.sum, device, _BUDGET_S)


def _read_bytes(weight_bytes: int) -> int:
    return max(_MIN_READ_BYTES, min(weight_bytes, _MAX_READ_BYTES))


def _plain_product(device: torch.device, dtype: torch.dtype, size: int) -> Product:
    return functools.partial(torch.matmul, *torch.randn(2, size, size, device=device).to(dtype))


def _quantized_product(dtype: torch.dtype, quantization: str, size: int) -> Product:
    weight, rows = torch.randn(2, size, size).to(dtype)
    return functools.partial(packing_for(quantization, kernels_available=True).layers(weight).multiply, rows, None)


def _matrix_speed(device: torch.device, product_of: Callable[[int], Product]) -> float:
    """Multiplications and additions per second, of square matrices as large as a slow machine has time for."""
    size, seconds = _MIN_MATRIX_SIZE // 2, 0.0
    while seconds < _RUN_S and size < _MAX_MATRIX_SIZE[device.type]:
        size *= 2
        multiply = product_of(size)
        seconds = _best_seconds(multiply, device, _RUN_S)
    return 2 * size**3 / min(seconds, _best_seconds(multiply, device, _BUDGET_S))


def _best_seconds(run: Product, device: torch.device, budget_s: float) -> float:
    """The shortest of the runs that the budget has time for, after a first one, which warms up."""
    _seconds(run, device)
    times = [_seconds(run, device)]
    while sum(times) < budget_s:
        times.append(_seconds(run, device))
    return min(times)


def _seconds(run: Product, device: torch.device) -> float:
    started_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
