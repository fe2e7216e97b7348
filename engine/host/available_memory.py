"""How much memory is available for the KV cache, and which errors mean that memory ran out."""

import errno

import torch

from engine.host.system_memory import system_available_bytes


def available_bytes(device: torch.device) -> int:
    """Returns the free bytes of the device; on the CPU those that the kernel can give, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return system_available_bytes()


def is_memory_shortage(error: Exception) -> bool:
    """Whether the error means that memory ran out. On the CPU torch raises a plain RuntimeError, `mmap` an OSError."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
