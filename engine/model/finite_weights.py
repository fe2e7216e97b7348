"""Refuses weights that are no numbers: a model with one of them would fail at each request that it reaches."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.checkpoint.stored_tensor import StoredTensor
from engine.core.errors import ModelError

__all__ = ["check_finite"]

_NAN_CODES = {torch.float8_e4m3fn: 0x7F}
"""The magnitude of NaN in formats that torch cannot add up, which have no infinity."""


_PIECE = 1 << 20
"""Numbers that are looked at together."""


def check_finite(module: PreTrainedModel, model: str) -> None:
    """Raises ModelError, with a parameter's name, if it has NaN or infinity. Takes the time of reading the weights."""
    for name, parameter in module.named_parameters():
        if not all(map(_is_finite, _parts_of(parameter))):
            raise ModelError(f"The checkpoint {model} is damaged: {name} has NaN or infinity; download it again.")


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that the content consists of."""
    if isinstance(tensor, StoredTensor):
        yield from (part for piece in tensor.pieces for part in piece.parts)
    else:
        yield tensor.detach()


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype in _NAN_CODES:
        return not bool(((tensor.view(torch.uint8) & 0x7F) == _NAN_CODES[tensor.dtype]).any())
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return True
    # Adding up is faster than looking at each, though it copies bfloat16; finite numbers may add up to infinity.
    pieces = torch.split(tensor.flatten(), _PIECE)
    return all(bool(piece.sum(dtype=torch.float32).isfinite()) or bool(piece.isfinite().all()) for piece in pieces)
