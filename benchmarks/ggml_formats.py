"""What llama.cpp's formats Q8_0 and Q4_0 make of a weight, as ggml's reference quantizer defines them.

Blocks of 32 along K share one scale, stored in float16, and have no minimum.
"""

import torch
from torch import Tensor

__all__ = ["q4_0", "q8_0"]

BLOCK_SIZE = 32


def q8_0(weight: Tensor) -> Tensor:
    """weight [N, K], K in whole blocks -> its numbers after a round trip, float32: codes -127 to 127 of max / 127."""
    blocks = weight.float().view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    codes = (blocks * _inverse(scales)).round()
    return (codes * scales.half().float()).view(weight.shape)


def q4_0(weight: Tensor) -> Tensor:
    """As q8_0, with codes -8 to 7: the number farthest from zero, whatever its sign, gets -8."""
    blocks = weight.float().view(-1, BLOCK_SIZE)
    farthest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scales = farthest / -8
    codes = (blocks * _inverse(scales) + 8.5).floor().clamp(0, 15) - 8
    return (codes * scales.half().float()).view(weight.shape)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales != 0, 1 / scales, 0)
