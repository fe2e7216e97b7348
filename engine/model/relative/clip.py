"""Norms of heads without a mean's weight: bounds of their length, and root mean squares; sums have a fixed order."""

import torch
from torch import Tensor, nn

from engine.mixers.sums import halved_sum

__all__ = ["Clip", "over_root_mean_square"]

_EPS = 1e-6


class Clip(nn.Module):
    """Scales vectors, and shortens those that are longer than a threshold to it."""

    def __init__(self, threshold: float, scale: Tensor | None = None) -> None:
        """`scale` [num_heads, size] multiplies the vectors before."""
        super().__init__()
        self._threshold = float(threshold)
        self.scale = None if scale is None else nn.Buffer(scale.detach().to(torch.float32, copy=True), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:  # [..., num_heads, size]
        wide = vectors.float()
        if self.scale is not None:
            wide = wide * self.scale
        lengths = torch.sqrt(halved_sum(wide * wide, -1))[..., None]
        return (wide * (self._threshold / (lengths + _EPS)).clamp(max=1.0)).to(vectors.dtype)


def over_root_mean_square(vectors: Tensor, eps: float) -> Tensor:
    """Returns vectors [..., size] in float32, over the root of their mean square."""
    squares = halved_sum(vectors * vectors, -1) / vectors.shape[-1]
    return vectors * torch.rsqrt(squares + eps)[..., None]
