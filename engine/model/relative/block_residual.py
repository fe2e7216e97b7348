"""Residuals that are attended to (Inkling 2): what a part of a layer reads is a mean of the sums of blocks of layers
before it, weighed by a query of its own. Every token has its own weights, and sums have a fixed order."""

from typing import Any

import torch
from torch import Tensor, nn

from engine.mixers.sums import halved_sum
from engine.model.relative.clip import over_root_mean_square

__all__ = ["BlockResidual"]

_TOKENS_AT_ONCE = 16


class BlockResidual(nn.Module):
    """Reads the sums of blocks before, and of the block that goes on, once for each query."""

    def __init__(self, residual: Any) -> None:
        super().__init__()
        query = residual.query.detach().to(torch.float32, copy=True)
        self.query = nn.Buffer(query.view(-1, query.shape[-1]), persistent=False)  # [num_queries, H]
        self._eps = float(residual.norm.eps)

    def forward(self, block_states: Tensor, partial_block_states: Tensor) -> tuple[Tensor, ...]:
        """block_states [1, T, N, H], partial_block_states [1, T, H] -> for each query [1, T, H] in float32."""
        starts = range(0, block_states.shape[1], _TOKENS_AT_ONCE)
        parts = (slice(start, start + _TOKENS_AT_ONCE) for start in starts)
        pieces = [self._read(block_states[:, part], partial_block_states[:, part]) for part in parts]
        return tuple(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))

    def _read(self, blocks: Tensor, partial: Tensor) -> list[Tensor]:
        states = over_root_mean_square(torch.cat([blocks, partial[:, :, None]], dim=2).float(), self._eps)
        return [_mean(states, halved_sum(states * query, -1) * len(query) ** -0.5) for query in self.query]


def _mean(states: Tensor, scores: Tensor) -> Tensor:
    """Returns the mean [1, T, H] of states [1, T, N, H], weighed by the softmax of scores [1, T, N]."""
    powers = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    weights = powers / halved_sum(powers, -1)[..., None]
    return halved_sum(weights[..., None] * states, 2)
