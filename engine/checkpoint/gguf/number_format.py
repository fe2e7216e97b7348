"""The narrowest number format that holds every number of a GGUF file; torch-free."""

import numpy as np

from engine.checkpoint.gguf.architectures import places_of
from engine.checkpoint.gguf.header import GgufFile, TensorInfo

__all__ = ["number_format_of"]

_WITHIN_BFLOAT16 = {"BF16", "MXFP4"}


def number_format_of(file: GgufFile) -> str:
    """Returns bfloat16, or float32 if that would round a number. Reads tensors of 32 bits only if they decide."""
    if not {tensor.kind.name for tensor in file.tensors.values()} <= {*_WITHIN_BFLOAT16, "F32"}:
        return "float32"
    wide = ((file.tensors.get(name), place.offset) for place in places_of(file) for name in place.sources)
    is_exact = all(_fits(tensor, offset) for tensor, offset in wide if tensor and tensor.kind.name == "F32")
    return "bfloat16" if is_exact else "float32"


def _fits(tensor: TensorInfo, offset: float) -> bool:
    numbers = np.memmap(tensor.path, np.uint8, "r", tensor.offset, (tensor.nbytes,)).view("<f4")
    return not np.any((numbers + np.float32(offset)).view(np.uint32) & 0xFFFF)
