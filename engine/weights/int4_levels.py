"""Weight quantization to 4 bits with integer levels: a number is `scale * multiplier * (code - zero)`.

A scale belongs to 256 numbers along K, a multiplier and a zero of 4 bits each to 32. Rows are rounded to integers of 8
bits (`engine.weights.activation_quantization`); weights and rows are transformed before (`engine.weights.hadamard`).

The error is 0.93 of that of llama.cpp's Q4_0 where weights are normally distributed, and less where they have heavier
tails; more, up to 1.6 times, where they are uniform or mostly zeros, which the transform makes normal, too. In the
embedded model's logits it is 0.90, and would be 0.98 without the transform.

Tried and left: a scale and a minimum per 32 and rows as they are (0.85, but an eighth more bytes, and decode of one row
takes 1.2 times as long); a scale and a minimum per 64 and integer rows (0.98, and prefill takes 1.7 times as long, for
sums are scaled every 64); 16 levels that are closer together near zero, without a minimum (0.86 to 0.95 in as many
bits, but more than Q4_0 where weights are not normally distributed).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.weights.activation_quantization import ROW_GROUP_SIZE
from engine.weights.affine_quantization import GROUP_SIZES, QuantizedMatrix, map_rows, spread

__all__ = ["Int4Matrix", "to_levels"]

_GROUP_SIZE, _SCALE_GROUP_SIZE = GROUP_SIZES[4], ROW_GROUP_SIZE


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A weight [N, K] of 4 bits, in G groups of 32 and S scale groups of 256 along K."""

    codes: Tensor  # [N, K] uint8
    multipliers: Tensor  # [N, G] uint8, 1 to 15
    zeros: Tensor  # [N, G] uint8, 0 to 15
    scales: Tensor  # [N, S] bfloat16

    @property
    def levels(self) -> Tensor:
        """The zero and the multiplier of each group in one byte, as the kernels take them: [N, G] uint8."""
        return self.zeros << 4 | self.multipliers

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [N, K], computed in float32."""
        num_in = self.codes.shape[1]
        multipliers, zeros = (spread(x, _GROUP_SIZE, num_in) for x in (self.multipliers, self.zeros))
        integers = multipliers * (self.codes.float() - zeros)
        return (integers * spread(self.scales, _SCALE_GROUP_SIZE, num_in)).to(dtype)


def to_levels(weight: Tensor, matrix: QuantizedMatrix) -> Int4Matrix:
    """Converts a weight [N, K], quantized to 4 bits as `matrix`, to integer levels with shared scales.

    The kernels' `to_levels` is faster and has the same results.
    """
    return Int4Matrix(*map_rows(_level_rows, weight, matrix.scales, matrix.minimums))


def _level_rows(weight: Tensor, scales: Tensor, minimums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Converts rows of weight [N, K], scales and minimums [N, G] to codes, multipliers, zeros and shared scales."""
    num_in, scales, minimums = weight.shape[1], scales.float(), minimums.float()
    # Both ends of the codes; zero is always between them.
    first, last = minimums, minimums + 15 * scales
    lowest, highest = torch.minimum(first, last).clamp_max_(0), torch.maximum(first, last).clamp_min_(0)
    steps = (highest - lowest) / 15
    zeros = _zeros(lowest, steps)
    shared = _over_scale_groups(steps / _largest_multiplier(zeros)).bfloat16()
    factors = spread(shared, _SCALE_GROUP_SIZE // _GROUP_SIZE, steps.shape[1])
    factors = torch.where(factors > 0, factors, 1)
    nearest = (steps / factors).round_()
    numbers = torch.nn.functional.pad(weight.float(), (0, -num_in % _GROUP_SIZE)).view(*steps.shape, _GROUP_SIZE)
    best = None
    for offset in (0, -1, 1):  # the nearest first, for errors whose squares are zero or infinite
        multipliers = (nearest + offset).clamp_(1, 15)
        zeros = _zeros(lowest, multipliers * factors)
        multipliers = torch.minimum(multipliers, _largest_multiplier(zeros))
        choice = _Levels.of(numbers, multipliers, zeros, multipliers * factors)
        best = choice if best is None else best.or_better(choice)
    assert best is not None
    codes, multipliers, zeros = (x.to(torch.uint8) for x in (best.codes, best.multipliers, best.zeros))
    return codes.flatten(1)[:, :num_in], multipliers, zeros, shared


def _zeros(lowest: Tensor, steps: Tensor) -> Tensor:
    """Returns the codes that stand for zero, where code 0 is nearest to `lowest`."""
    return (-lowest / torch.where(steps > 0, steps, torch.inf)).round_().clamp_(0, 15)


def _largest_multiplier(zeros: Tensor) -> Tensor:
    """Returns the largest multipliers for which multiplier * (code - zero) is in -127 to 127 for every code."""
    farthest = torch.maximum(zeros, 15 - zeros)
    return (torch.full_like(farthest, 127) / farthest).floor_().clamp_max_(15)


def _over_scale_groups(values: Tensor) -> Tensor:
    """Returns the largest value of each scale group: [N, G] -> [N, S]."""
    size = _SCALE_GROUP_SIZE // _GROUP_SIZE
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % size))
    return padded.view(len(values), -1, size).amax(dim=2)


@dataclass(frozen=True, slots=True)
class _Levels:
    """One choice of multipliers and zeros, and the codes nearest to the numbers [N, G, 32]; all float32."""

    codes: Tensor  # [N, G, 32]
    multipliers: Tensor  # [N, G]
    zeros: Tensor  # [N, G]
    errors: Tensor  # [N, G], sums of squares

    @classmethod
    def of(cls, numbers: Tensor, multipliers: Tensor, zeros: Tensor, steps: Tensor) -> "_Levels":
        codes = (numbers / steps[..., None]).add_(zeros[..., None]).round_().clamp_(0, 15)
        errors = ((codes - zeros[..., None]) * steps[..., None]).sub_(numbers).square_()
        while errors.shape[2] > 1:  # summed in the order in which the kernel does, too
            first, second = errors.chunk(2, dim=2)
            errors = first + second
        return cls(codes, multipliers, zeros, errors[..., 0])

    def or_better(self, other: "_Levels") -> "_Levels":
        is_better = other.errors < self.errors
        return _Levels(
            torch.where(is_better[..., None], other.codes, self.codes),
            torch.where(is_better, other.multipliers, self.multipliers),
            torch.where(is_better, other.zeros, self.zeros),
            torch.where(is_better, other.errors, self.errors),
        )
