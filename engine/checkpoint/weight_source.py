"""Where weights come from that transformers does not read itself: parameter -> weight, as a file stores it."""

from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.gguf.header import read_gguf
from engine.checkpoint.gguf.weights import gguf_weights
from engine.checkpoint.local import is_gguf

__all__ = ["stored_weights"]


def stored_weights(model: str, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Returns the weights of a checkpoint, to be read in `dtype` one by one; None if its files have plain numbers,
    which transformers reads. Raises ModelError."""
    return gguf_weights(read_gguf(Path(model)), dtype) if is_gguf(model) else None
