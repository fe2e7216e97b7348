"""A model that is ready to run, with what its runner must know of it."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.attention.kv_cache import LayerShape
from engine.core.machine import ModelSize
from engine.runner.pooling import HeadInputs


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Runs over the model's KV cache. What it writes there is written over when the model computes its guesses."""

    module: PreTrainedModel
    """Shares with the model's own what is not rounded."""
    size: ModelSize
    """What one more guess of each request reads and multiplies."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, its linear layers packed, every layer known to go through paged attention."""

    module: PreTrainedModel
    layers: tuple[LayerShape, ...]
    device: torch.device
    dtype: torch.dtype
    architecture: str
    vocab_size: int
    max_model_len: int
    """The longest context the model itself supports."""
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    size: ModelSize
    """What its steps read and multiply."""
    linear: str
    """Name of the matrix-product backend."""
    has_kernels: bool
    head_inputs: HeadInputs
    draft: DraftModel | None
    """None unless it was asked for."""
