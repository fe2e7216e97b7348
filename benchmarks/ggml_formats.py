"""llama.cpp's weight formats Q8_0 and Q4_0, as round trips by the definition of ggml's reference quantizer.

Blocks of 32 along K share one scale, stored in float16, and have no minimum.
"""

import torch
from torch import Tensor

__all__ = ["q4_0", "q8_0"]

BLOCK_SIZE = 32


def q8_0(weight: Tensor) -> Tensor:
    """Returns a weight [N, K], K in whole blocks, after a round trip through Q8_0: codes -127 to 127 of max / 127.

    The result is float32.
    """
    blocks = weight.float().view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    codes = (blocks * _inverse(scales)).round()
    return (codes * scales.half().float()).view(weight.shape)


def q4_0(weight: Tensor) -> Tensor:
    """Returns a weight after a round trip through Q4_0: codes -8 to 7, with -8 for the number farthest from zero."""
    blocks = weight.float().view(-1, BLOCK_SIZE)
    farthest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scales = farthest / -8
    codes = (blocks * _inverse(scales) + 8.5).floor().clamp(0, 15) - 8
    return (codes * scales.half().float()).view(weight.shape)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales != 0, 1 / scales, 0)
