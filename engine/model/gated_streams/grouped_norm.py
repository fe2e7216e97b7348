"""RMSNorms of several streams, each by itself and with numbers of its own."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GroupedNorm"]


class GroupedNorm(nn.Module):
    """Norms each stream, and multiplies by one more than a weight; both in float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self._size, weight = int(norm.group_size), norm.weight.detach()
        self.norm = _norm_without_weight(norm, self._size)
        self.factors = nn.Buffer(1.0 + weight.float(), persistent=False)  # [num_streams * size]

    def forward(self, streams: Tensor) -> Tensor:  # [..., num_streams * size]
        normed: Tensor = self.norm(streams.float().reshape(*streams.shape[:-1], -1, self._size))
        return (normed.flatten(-2) * self.factors).to(streams.dtype)


def _norm_without_weight(norm: Any, size: int) -> nn.Module:
    """Returns a norm of `size` numbers of the kind of `norm`, which is fused as those are; its weights are 0."""
    made: nn.Module = type(norm)(size, eps=norm.eps)
    del made.weight
    made.weight = nn.Buffer(torch.zeros(size, dtype=norm.weight.dtype, device=norm.weight.device), persistent=False)
    return made
