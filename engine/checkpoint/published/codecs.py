"""How the published precisions store rows of a weight, each decoded to float32 by the formula that defines it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["LookedUp", "MxFp4", "NvFp4", "PackedIntegers", "Scaled", "packed", "unpacked"]

_FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Numbers of 8 bits, floating point or integers, times a scale for each group of columns."""

    group_size: int

    is_threaded: ClassVar[bool] = False

    def decode(self, *parts: Tensor) -> Tensor:
        """Decodes numbers [R, K], scales [R, G] and, for integers, perhaps zeros [R, G]."""
        numbers, scales, *zeros = parts
        columns = numbers.shape[1]
        values = numbers.float()
        if zeros:
            values -= spread(zeros[0], self.group_size, columns)
        return values.mul_(spread(scales, self.group_size, columns))


@dataclass(frozen=True, slots=True, eq=False)
class PackedIntegers:
    """Integers of a few bits, several in a word of 32, the first in its lowest bits; each minus a zero, times a scale.

    Columns are in groups of `group_size`, or column k is in group `groups[k]`.
    """

    bits: int
    group_size: int
    columns: int
    groups: Tensor | None = None  # [K]

    is_threaded: ClassVar[bool] = False

    def decode(self, *parts: Tensor) -> Tensor:
        """Decodes words [R, K * bits / 32], scales [R, G] and zeros [R, G]."""
        words, scales, zeros = parts
        codes = unpacked(words, self.bits)[:, : self.columns].float()
        return codes.sub_(self._spread(zeros)).mul_(self._spread(scales))

    def _spread(self, values: Tensor) -> Tensor:
        if self.groups is not None:
            return values.float()[:, self.groups]
        return spread(values, self.group_size, self.columns)


@dataclass(frozen=True, slots=True)
class MxFp4:
    """Numbers of 4 bits (e2m1), two in a byte, the first in its lower half, times a power of two for each 32."""

    is_threaded: ClassVar[bool] = False

    def decode(self, *parts: Tensor) -> Tensor:
        """Decodes bytes [R, G, 16] and exponents [R, G], which are 127 more than those of the powers."""
        packed, exponents = parts
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(2)
        powers = torch.tensor([2.0 ** (exponent - 127) for exponent in range(255)] + [float("nan")])
        return (torch.tensor(_FP4_LEVELS)[codes.int()] * powers[exponents.int()][..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class NvFp4:
    """Numbers of 4 bits (e2m1), two in a byte, the first in its lower half, times a scale of 8 bits (e4m3) for each 16,
    which a factor of the row multiplies first."""

    is_threaded: ClassVar[bool] = False

    def decode(self, *parts: Tensor) -> Tensor:
        """Decodes bytes [R, K / 2], scales [R, K / 16] and factors [R, 1]."""
        packed, scales, factors = parts
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        return torch.tensor(_FP4_LEVELS)[codes.int()] * spread(scales.float() * factors, 16, codes.shape[1])

    def blocks(self, *parts: Tensor) -> Tensor:
        """Returns rows of bytes: the factor, and for each 16 numbers their scale before them."""
        packed, scales, factors = parts
        groups = [scales.view(torch.uint8)[..., None], packed.view(*scales.shape, 8)]
        return torch.cat([factors.contiguous().view(torch.uint8), torch.cat(groups, dim=2).flatten(1)], dim=1)


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Codes of 4 bits that choose one of 16 levels, two in a byte, the first in its upper half, times a scale."""

    levels: tuple[float, ...]
    group_size: int

    is_threaded: ClassVar[bool] = False

    def decode(self, *parts: Tensor) -> Tensor:
        """Decodes bytes [R, K / 2] and scales [R, K / group_size]."""
        packed, scales = parts
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1)
        return torch.tensor(self.levels)[codes.int()] * spread(scales, self.group_size, codes.shape[1])


def spread(values: Tensor, size: int, count: int) -> Tensor:
    """Repeats each of the values [R, G] `size` times, up to `count`: [R, count], float32."""
    return values.float().repeat_interleave(size, dim=1)[:, :count]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the integers in words [R, W] of 32 bits: [R, W * 32 / bits] int32, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(1)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Returns integers [R, K] as words, the inverse of `unpacked`; K is a multiple of 32 / bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    words = (codes.view(len(codes), -1, 32 // bits).long() << shifts).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
