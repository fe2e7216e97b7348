"""An MTP head whose layer runs in the kernels as a whole: one call into C++ from what the head reads of each token to
its hidden states.

`HeadForward` is the plain path: the same operators in the same order, so the same bits.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from engine.attention.kv_cache import KVCache
from engine.model.decoder_parts import DecoderParts, NormParts
from engine.model.kernel_forward import KernelForward
from engine.runner.forward import ForwardOutput, HeadForward, HeadInput
from engine.runner.model_inputs import ModelInputs
from engine.weights.linear_parts import LinearParts

__all__ = ["HeadParts", "JoinParts", "KernelHeadForward", "KernelMtpInput"]

_FEWEST_ROWS = 64


class JoinParts(msgspec.Struct, frozen=True, eq=False):
    """What makes a head's input: two RMSNorms and a projection."""

    embedding_norm: NormParts
    hidden_norm: NormParts
    projection: LinearParts
    is_hidden_first: bool
    """Whether the projection reads the hidden state before the embedding."""


class HeadParts(msgspec.Struct, frozen=True, eq=False):
    """A whole head, from token ids and the hidden states before them to logits."""

    join: JoinParts
    decoder: DecoderParts
    """Its layer, with the model's embedding and language-model head."""


class KernelMtpInput(HeadInput):
    """Makes a head's input by the kernels alone."""

    def __init__(self, parts: JoinParts) -> None:
        super().__init__()
        self._norms, self._is_hidden_first = (parts.embedding_norm, parts.hidden_norm), parts.is_hidden_first
        self._weight, self._bias = parts.projection.weight, parts.projection.bias

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:  # [T, H], [T, H] -> [T, H]
        rows = zip((embeddings, hidden), self._norms, strict=True)
        parts = [torch.ops.twostep.rms_norm(each, norm.weight, norm.eps) for each, norm in rows]
        return self._weight.multiply(torch.cat(parts[::-1] if self._is_hidden_first else parts, dim=-1), self._bias)


class KernelHeadForward(HeadForward):
    """The forward pass of a head: that of its layer, whose embedding is a table of what the head reads, a row for each
    token of the batch."""

    def __init__(self, parts: HeadParts, cache: KVCache) -> None:
        super().__init__(KernelMtpInput(parts.join))
        self.parts = parts
        self._cache, self._gather = cache, parts.decoder.after_embedding
        self._make_table(_FEWEST_ROWS)

    def __call__(self, inputs: ModelInputs, hidden: Tensor, kept: Sequence[int]) -> ForwardOutput:
        count = len(inputs.token_ids)
        if count > len(self._table):
            self._make_table(count)
        embeddings = self.parts.decoder.embedding.index_select(0, inputs.token_ids)
        if self._gather is not None:
            embeddings = self._gather.run(embeddings)
        self._table[:count] = self._join(embeddings, hidden)
        return self._forward(replace(inputs, token_ids=self._numbers[:count]), kept)

    def _make_table(self, num_rows: int) -> None:
        decoder = self.parts.decoder
        self._table = torch.empty(num_rows, self.parts.join.projection.out_features, dtype=decoder.embedding.dtype)
        self._numbers = torch.arange(num_rows)
        decoder = msgspec.structs.replace(decoder, embedding=self._table, after_embedding=None)
        self._forward = KernelForward(decoder, self._cache)
