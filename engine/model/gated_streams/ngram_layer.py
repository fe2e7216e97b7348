"""What n-grams of tokens add to the streams before a layer (per-layer embeddings of Qwen 4)."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.mixers.convolution import Convolution
from engine.mixers.registry import advance
from engine.mixers.sums import halved_sum
from engine.model.gated_streams.grouped_norm import GroupedNorm
from engine.model.gated_streams.ngram_embedding import NGramEmbedding

__all__ = ["NGramLayer"]

_LEAST = 1e-6


class NGramLayer(nn.Module):
    """Adds a value of the n-grams to each stream, as far as their key and the stream agree, and a convolution of what
    is added over tokens some way apart."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.ple_embedding = NGramEmbedding(layer.ple_embedding)
        self.key_proj, self.value_proj = layer.key_proj, layer.value_proj
        self.norm_key, self.norm_query, self.norm_conv = (
            GroupedNorm(each) for each in (layer.norm_key, layer.norm_query, layer.norm_conv)
        )
        self.taps = nn.Buffer(_spread_taps(layer.conv1d), persistent=False)
        self._num_streams, self._size = int(layer.hc_count), int(layer.hidden_size)

    def forward(self, streams: Tensor, token_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """streams [1, T, N * H], token_ids [1, T] -> what is added to the streams [1, T, N * H]."""
        embedded = self.ple_embedding(token_ids)
        products: Tensor = self.norm_key(self.key_proj(embedded)) * self.norm_query(streams)
        gates = self._gates(products.view(*products.shape[:-1], self._num_streams, self._size))
        added: Tensor = (gates * self.value_proj(embedded)[:, :, None].float()).flatten(2).to(streams.dtype)
        convolved = advance(Convolution(self.norm_conv(added)[0], self.taps, None, is_gated=True))
        return added + convolved[None]

    def _gates(self, products: Tensor) -> Tensor:  # [1, T, N, H] -> [1, T, N, 1]
        agreement = halved_sum(products.float(), -1)[..., None] / math.sqrt(self._size)
        return torch.sigmoid(agreement.abs().clamp_min(_LEAST).sqrt() * agreement.sign())


def _spread_taps(convolution: Any) -> Tensor:
    """Returns the weight of a depthwise convolution over tokens some way apart as that of one over all tokens between
    them: [taps, channels], in float32."""
    weight: Tensor = convolution.weight.detach()[:, 0].float().t()
    distance = cast("tuple[int]", convolution.dilation)[0]
    taps = weight.new_zeros((len(weight) - 1) * distance + 1, weight.shape[1])
    taps[::distance] = weight
    return taps
