"""Gated residuals (Qwen 4): what a part of a layer reads is a mean of several streams, in which each number has a gate
of its own, and each stream gets a share of its result. The gates are made of all streams; sums have a fixed order."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.mixers.sums import halved_sum
from engine.model.gated_streams.grouped_norm import GroupedNorm

__all__ = ["GatedResidual"]


class GatedResidual(nn.Module):
    """Weighs the streams before and behind a part of a layer, or before the head."""

    def __init__(self, residual: Any) -> None:
        super().__init__()
        self.hc_norm, self._num_streams = GroupedNorm(residual.hc_norm), int(residual.hc_count)
        self.input_mix_weight_down, self.input_mix_weight_up = (
            residual.input_mix_weight_down,
            residual.input_mix_weight_up,
        )
        self.block_inject_weight = residual.block_inject_weight

    def forward(self, streams: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """streams [1, T, N * H] -> what the part reads [1, T, H], and if it writes, the streams and the shares of its
        result [1, T, N]."""
        normed = self.hc_norm(streams)
        inner = functional.silu(self.input_mix_weight_down(normed) / self._num_streams)
        gates = torch.sigmoid(self.input_mix_weight_up(inner))
        read = self._mean(gates * normed)
        if self.block_inject_weight is None:
            return read
        return read, streams, 2 * torch.sigmoid(self.block_inject_weight(normed) / self._num_streams)

    def _mean(self, streams: Tensor) -> Tensor:  # [1, T, N * H] -> [1, T, H]
        total = halved_sum(streams.float().view(*streams.shape[:-1], self._num_streams, -1), -2)
        return (total / self._num_streams).to(streams.dtype)
