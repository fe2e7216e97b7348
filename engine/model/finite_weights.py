"""Refuses weights that are no numbers: a model with one of them would fail at each request that it reaches."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.checkpoint.stored_tensor import StoredTensor
from engine.core.errors import ModelError

__all__ = ["check_finite"]

_NAN_CODES = {torch.float8_e4m3fn: 0x7F}
"""The magnitude of NaN in formats that torch cannot add up, which have no infinity."""
_PIECE = 1 << 20
"""Numbers that are looked at together: what is made of them stays in the caches."""


def check_finite(module: PreTrainedModel, model: str) -> None:
    """Raises ModelError, with a parameter's name, if it has NaN or infinity. Takes the time of reading the weights."""
    for name, parameter in module.named_parameters():
        parts = parameter.parts if isinstance(parameter, StoredTensor) else (parameter.detach(),)
        if not all(_is_finite(piece) for part in parts for piece in torch.split(part.flatten(), _PIECE)):
            raise ModelError(f"The checkpoint {model} is damaged: {name} has NaN or infinity; download it again.")


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype in _NAN_CODES:
        return not bool(((tensor.view(torch.uint8) & 0x7F) == _NAN_CODES[tensor.dtype]).any())
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return True
    # Adding up is faster than looking at each, though it copies bfloat16; finite numbers may add up to infinity.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
