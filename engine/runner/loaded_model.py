"""A loaded model, ready to run, with everything that its runner must know about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.kv_cache import LayerShape, VectorShape, bytes_per_block
from engine.core.machine import ModelSize
from engine.mixers.state import StateShape
from engine.runner.forward import HeadInput


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model: one with keys and values of its own, which may be the checkpoint's MTP head, or a self-speculative
    one, which runs over the target model's. What the latter writes there is overwritten when the target model verifies
    its draft tokens.
    """

    module: Any
    """The draft model's module, or what the kernels run in its place (`engine.model.drafting.kernel_head`); parameters
    and buffers of a self-speculative one that are not rounded are shared with the target model's."""
    size: ModelSize
    """Bytes and operations of one draft pass, which adds a draft token to each request."""
    layers: tuple[LayerShape, ...] = ()
    """The layers of its own KV, behind those of the target model in the cache; none for a self-speculative one."""
    join: HeadInput | None = None
    """What makes the input of a head, MTP or EAGLE-3; None for other draft models, which read tokens."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, its linear layers packed, every attention layer verified to run over the paged cache."""

    module: Any
    """The model's module, or what the kernels run in its place (`engine.model.decoder_parts`)."""
    layers: tuple[LayerShape, ...]
    states: tuple[StateShape, ...]
    """Shapes of the recurrent states of one request, in the order in which a forward pass uses them."""
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Type of the KV cache (`engine.attention.kv_format`)."""
    architecture: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    """The longest context the model itself supports."""
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    """See `engine.model.weights_fingerprint`."""
    weight_bytes: int
    size: ModelSize
    """Bytes that the model's steps read, and operations that they do."""
    linear: str
    """Name of the matmul backend."""
    has_kernels: bool
    draft: DraftModel | None
    """The draft model; None unless the configuration asks for one."""

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        """The layers of the KV cache: the model's own, then those of the draft model."""
        return self.layers + (self.draft.layers if self.draft else ())

    @property
    def has_head(self) -> bool:
        """Whether the draft model is a head, MTP or EAGLE-3."""
        return self.draft is not None and self.draft.join is not None

    @property
    def kept_hidden(self) -> VectorShape | None:
        """The hidden states that the KV cache keeps, for a head."""
        return VectorShape(self.hidden_size, self.dtype) if self.has_head else None

    def bytes_per_block(self, block_size: int, groups: Sequence[int] = ()) -> int:
        """Returns the bytes that a block of the KV cache takes, over all layers and with hidden states, or if the
        layers are in groups, over those of one group."""
        hidden = self.kept_hidden.bytes_per_token * block_size if self.kept_hidden else 0
        return bytes_per_block(self.kv_layers, block_size, self.kv_dtype, groups) + hidden
