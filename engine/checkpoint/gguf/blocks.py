"""What the blocks of GGUF's tensor types stand for, in torch; each type's formula is that of llama.cpp's ggml-quants.c.

A block of integers is read as codes, and a scale and perhaps an offset for each group of them: a number is
`code * scale + offset`. Scales and offsets, and for all types but those with an offset the numbers themselves, have at
most 24 significant bits, so that float32 holds them exactly; what has an offset is rounded once, as in the formula.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.gguf.block_types import NUMBER_OF, BlockType

__all__ = ["BlockCodec", "Blocks", "Expander"]

Expander = Callable[[Tensor, int], Tensor]
"""Returns the numbers [R, K] in float32 of rows [R, bytes] and the number of their type."""


class Blocks(NamedTuple):
    """What rows of blocks, or single blocks, consist of: groups of numbers `codes * scales + offsets`."""

    codes: Tensor  # [R, G, S] int8
    scales: Tensor  # [R, G] float32
    offsets: Tensor | None  # [R, G] float32


Groups = tuple[Tensor, Tensor, Tensor | None]
"""The members of `Blocks` for single blocks."""

_INT4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of the format e2m1."""


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """The codec of a tensor type: its one part is the rows' bytes."""

    kind: BlockType
    expander: Expander | None = None
    """Expands blocks faster than torch does, to the same bits: an operator of the kernels."""

    @property
    def is_threaded(self) -> bool:
        return self.expander is not None and not self.is_dense

    @property
    def is_dense(self) -> bool:
        """Whether each number is stored by itself."""
        return self.kind.name in _DENSE

    def decode(self, *parts: Tensor) -> Tensor:
        """Returns the numbers [R, K] of rows [R, bytes], in float32."""
        (rows,) = parts
        if self.is_dense:
            return rows.view(_DENSE[self.kind.name]).float()
        if self.expander is not None:
            return self.expander(rows, NUMBER_OF[self.kind])
        codes, scales, offsets = self.read(rows)
        numbers = codes * scales[..., None]
        return (numbers if offsets is None else numbers.add_(offsets[..., None])).view(len(rows), -1)

    def read(self, rows: Tensor) -> Blocks:
        """Returns what rows [R, bytes] of integers consist of."""
        codes, scales, offsets = _GROUPS[self.kind.name](rows.reshape(-1, self.kind.num_bytes))
        codes, scales = codes.view(len(rows), -1, codes.shape[-1]), scales.view(len(rows), -1)
        return Blocks(codes, scales, None if offsets is None else offsets.view(len(rows), -1))


_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(blocks: Tensor, at: int) -> Tensor:  # [B, bytes] -> [B, 1] float32
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Returns the lower halves of the bytes [..., S], then the upper ones: [..., 2 S] uint8."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:  # [B, bytes] -> [B, 8 * bytes] uint8, each byte's lowest bit first
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _group(codes: Tensor, size: int) -> Tensor:  # [B, S] -> [B, S / size, size] int8
    return codes.to(torch.int8).view(len(codes), -1, size)


def _q8_0(blocks: Tensor) -> Groups:
    return _group(blocks[:, 2:].contiguous().view(torch.int8), 32), _half(blocks, 0), None


def _q4_0(blocks: Tensor) -> Groups:
    return _group(_nibbles(blocks[:, 2:]).to(torch.int8) - 8, 32), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Groups:
    return _group(_nibbles(blocks[:, 4:]), 32), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _group(codes.to(torch.int8) - 16, 32), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _group(codes, 32), _half(blocks, 0), _half(blocks, 2)


def _iq4_nl(blocks: Tensor) -> Groups:
    return _group(_looked_up(_INT4_LEVELS, _nibbles(blocks[:, 2:])), 32), _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Groups:
    high = blocks[:, 2:4].contiguous().view(torch.int16).int()  # two bits for each group of 32
    shifts = torch.arange(8, dtype=torch.int32) * 2
    low = (blocks[:, 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15).flatten(1)
    scales = low.int() | (high >> shifts & 3) << 4
    codes = _looked_up(_INT4_LEVELS, _nibbles(blocks[:, 8:].reshape(-1, 8, 16)))
    return codes, _half(blocks, 0) * (scales - 32), None


def _mxfp4(blocks: Tensor) -> Groups:
    halves = torch.tensor(
        [2.0 ** (exponent - 128) for exponent in range(256)]
    )  # of scales: levels are twice the numbers
    return _group(_looked_up(_FP4_LEVELS, _nibbles(blocks[:, 1:])), 32), halves[blocks[:, :1].int()], None


def _looked_up(levels: tuple[int, ...], codes: Tensor) -> Tensor:
    return torch.tensor(levels, dtype=torch.int8)[codes.int()]


def _q2_k(blocks: Tensor) -> Groups:
    levels, packed = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = _group((packed >> shifts & 3).flatten(1), 16)
    return codes, _half(blocks, 80) * (levels & 15), -(_half(blocks, 82) * (levels >> 4))


def _q3_k(blocks: Tensor) -> Groups:
    masks, packed, levels = blocks[:, :32], blocks[:, 32:96].reshape(-1, 2, 1, 32), blocks[:, 96:108]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    low = (packed >> shifts & 3).flatten(1)
    high = (masks[:, None] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(1)
    low_scales = torch.cat([levels[:, :8] & 15, levels[:, :8] >> 4], dim=1)
    high_scales = (levels[:, None, 8:] >> shifts & 3).flatten(1)
    scales = (low_scales | high_scales << 4).int() - 32
    return _group((low | high << 2).to(torch.int8) - 4, 16), _half(blocks, 108) * scales, None


def _q4_k(blocks: Tensor) -> Groups:
    scales, offsets = _scales_of_6_bits(blocks)
    return _group(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1), 32), scales, offsets


def _q5_k(blocks: Tensor) -> Groups:
    scales, offsets = _scales_of_6_bits(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return (low | high << 4).to(torch.int8), scales, offsets


def _scales_of_6_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and offsets [B, 8] of a block that begins with two factors and twelve bytes of levels."""
    first, second, third = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    offsets = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * offsets)


def _q6_k(blocks: Tensor) -> Groups:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).to(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return _group(codes.flatten(1), 16), _half(blocks, 208) * scales, None


_GROUPS: dict[str, Callable[[Tensor], Groups]] = {
    **{"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs},
    **{"MXFP4": _mxfp4, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
}
