"""Rotation of the last numbers of heads, in which neighbours are rotated together."""

from torch import Tensor

__all__ = ["rotate"]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads [1, T, H, size] in their place by cosines and sines [1, T, pairs], in float32; returns them."""
    last = heads[..., -2 * cos.shape[-1] :]
    one, other = last[..., 0::2], last[..., 1::2]
    wide_one, wide_other, cos, sin = one.float(), other.float(), cos[:, :, None], sin[:, :, None]
    rotated = wide_one * cos - wide_other * sin, wide_other * cos + wide_one * sin
    one.copy_(rotated[0])
    other.copy_(rotated[1])
    return heads
