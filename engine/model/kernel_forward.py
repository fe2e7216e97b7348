"""The forward pass as one call into C++ from token ids to the last hidden states, and then the head.

`TransformersForward` is the plain path: the same operators in the same order, so the same bits. Only sums that no norm
reads, a layer's last one among them, and products with a multiplier are torch's there, which keeps subnormal numbers;
here they may become zero, as they do in every matmul.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention.kv_cache import KVCache
from engine.model.decoder_parts import DecoderParts
from engine.runner.forward import ForwardOutput, HiddenOf, kept_rows
from engine.runner.model_inputs import ModelInputs

__all__ = ["KernelForward"]


class KernelForward:
    """The forward pass of a decoder whose parts the kernels know."""

    name = "kernels"

    def __init__(self, parts: DecoderParts, cache: KVCache) -> None:
        self.parts = parts
        self._weight, self._bias, self._gather = parts.head.weight, parts.head.bias, parts.head.after
        decoder = parts.bound(cache)
        self.linears: list[Any] = decoder.linears()
        """The layers to which adapters may add: see `engine/kernels/layers/decoder.cpp`."""
        # Called as an operator with an object, torch throws and catches two exceptions.
        self._run_decoder = decoder.run

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf = None) -> ForwardOutput:
        paged = inputs.attention
        num_tokens = len(inputs.token_ids)
        rows = None if kept is None or [*kept] == [*range(num_tokens)] else kept_rows(kept, inputs)
        wants_last, layers = hidden_of == (), list(hidden_of or ())
        hidden, of_layers = self._run_decoder(
            inputs.token_ids,
            inputs.positions,
            [group.block_tables for group in inputs.groups],
            paged.cu_seqlens_q,
            paged.context_lens,
            [group.slot_mapping for group in inputs.groups],
            None if wants_last else rows,
            layers,
            inputs.adapters,
        )
        kept_hidden = hidden.index_select(0, rows) if wants_last and rows is not None else hidden
        kept_hidden = kept_hidden if (divisor := self.parts.hidden_divisor) is None else kept_hidden / divisor
        return ForwardOutput(self._head(kept_hidden), kept_hidden, hidden if wants_last else of_layers)

    def settle(self, num_kept: Sequence[int]) -> None:
        """Does nothing: no part that the kernels know has states."""

    def _head(self, hidden: Tensor) -> Tensor:  # [T, H] -> [T, vocab_size]
        logits = self._weight.multiply(hidden, self._bias)
        logits = logits if self._gather is None else self._gather.run(logits)
        softcap, factor, divisor = self.parts.logits_softcap, self.parts.logits_factor, self.parts.logits_divisor
        logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        logits = logits if factor is None else logits * factor
        return logits if divisor is None else logits / divisor
