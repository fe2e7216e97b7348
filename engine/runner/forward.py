"""The forward pass, from a batch's inputs to the logits of its positions, through the model code of transformers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import AttentionBackend, AttentionMetadata
from engine.attention.kv_cache import KVCache
from engine.attention.registry import AttentionCall, attention_handler
from engine.runner.model_inputs import ModelInputs

__all__ = ["Forward", "TransformersForward", "kept_rows"]


class Forward(Protocol):
    @property
    def name(self) -> str:
        """What computes the step, as `EngineInfo.forward` has it."""

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None) -> Tensor:
        """Returns logits [num_kept, vocab] at the `kept` positions of the flat batch; None keeps all.

        Also writes the batch's keys and values to the KV cache.
        """


class TransformersForward:
    """Runs any model by its own code, with attention over the paged KV cache."""

    name = "transformers"

    def __init__(self, module: PreTrainedModel, cache: KVCache, backend: AttentionBackend) -> None:
        self._module = module
        self._cache = cache
        self._backend = backend

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None) -> Tensor:
        rows = 0 if kept is None else kept_rows(kept, inputs)  # models read 0 as "all"
        token_ids, positions = inputs.token_ids[None], inputs.positions[None]  # one long sequence to the model
        with attention_handler(_PagedAttention(self._backend, self._cache, inputs.attention)):
            output = self._module(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
        return output.logits[0]  # type: ignore[no-any-return]


def kept_rows(kept: Sequence[int], inputs: ModelInputs) -> Tensor:
    """Returns the kept positions as a tensor; at least one, since models read an empty choice as all positions."""
    return torch.tensor(kept or [0], device=inputs.token_ids.device)


class _PagedAttention:
    """Writes each layer's keys and values to the cache, then attends over it."""

    def __init__(self, backend: AttentionBackend, cache: KVCache, metadata: AttentionMetadata) -> None:
        self._backend = backend
        self._cache = cache
        self._metadata = metadata

    def attend(self, call: AttentionCall) -> Tensor:
        cache = self._cache.layers[call.layer]
        self._backend.write_kv(call.key, call.value, cache, self._metadata.slot_mapping)
        return self._backend.paged_attention(call.query, cache, self._metadata, call.params)
