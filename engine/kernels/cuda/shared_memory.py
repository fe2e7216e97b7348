"""How much shared memory a program on a GPU may have."""

from typing import Any

import torch

__all__ = ["shared_bytes"]

_LEAST_BYTES = 99 << 10  # of the smallest supported GPU, for where there is none


def shared_bytes(device: torch.device) -> int:
    """Returns how much a program may have on this device: on an Ada less than half of what it has on a Hopper."""
    if device.type != "cuda":
        return _LEAST_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
