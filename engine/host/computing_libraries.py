"""What tells machines and installations apart that compute other numbers from the same weights."""

import importlib.metadata
import platform

import torch


def computing_libraries(device: torch.device, forward: str, has_kernels: bool) -> str:
    """Returns the versions of what computes on the device, and the kind of GPU or CPU where the numbers depend on it.
    `forward` is that of `EngineInfo`."""
    parts = [platform.machine(), f"torch {torch.__version__}"]
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), f"triton {_version('triton')}"]
    elif not has_kernels:  # whose sums have one order, whatever the CPU
        parts += [torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads"]
    if forward != "kernels":
        parts.append(f"transformers {_version('transformers')}")
    return ", ".join(parts)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
