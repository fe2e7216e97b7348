"""Affine weight quantization to 8 bits, and the first step to 4: a number is `minimum + scale * code`.

Each group along K has a scale and a minimum of its own: groups of 256 at 8 bits, of 32 at 4. Codes of 8 bits are
multiplied as they are by the integers of `engine.weights.activation_quantization`, and their products summed exactly.
Codes of 4 bits go on to `engine.weights.int4_levels`. Where rows are rounded to 8 bits, weights and rows go through a
Hadamard transform before (`engine.weights.hadamard`).

llama.cpp multiplies Q8_0 weights, a scale per 32, by rows that it rounds to 8 bits, a scale per 32, too. Transformed
weights and rows are all nearly normal. So products here err 0.9 times as much as llama.cpp's where rows have heavy
tails, 0.6 times where one number of a row is far larger than the others, but 1.2 times where weights and rows are
normal by themselves. In the embedded model both err alike. `python -m benchmarks.quantization` measures the errors.

Tried and left, at 8 bits: rows of 16 bits for all layers, not only the head (0.7 times the error in the embedded
model's logits, but prompts take 1.7 times as long); rows of 8 without the transform, a scale per 256 or per 16 (1.5
times the error, or as much, but a scale per 16 is work); rows of 8 whose large numbers have upper halves in a list (as
much, with a tenth of all fours in the list); transformed rows with a scale per 128 or 64 (0.97 and 0.94 times, but what
AMX tiles add up is stored and scaled once a group); weights in groups of 32 and rows as they are (9 bits a weight, and
a step of one row takes 1.3 times as long, since expanding codes takes longer than reading them); one scale per output
channel (twice the error).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BITS", "GROUP_SIZES", "NUM_REFITS", "QuantizedMatrix", "dequantize", "map_rows", "quantize", "spread"]

BITS = {"int8": 8, "int4": 4}  # name of the quantization -> bits of a code
GROUP_SIZES = {8: 256, 4: 32}  # along K, by the bits of a code
NUM_REFITS = {8: 0, 4: 5}  # at 8 bits, a line through the codes is as good as the one through both ends
_CHUNKS = {"cpu": 1 << 15, "cuda": 1 << 25}
"""Numbers quantized at once: on the CPU the most that torch does not spread over threads itself."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A weight [N, K], quantized in G groups along K."""

    codes: Tensor  # [N, K] uint8
    scales: Tensor  # [N, G] bfloat16
    minimums: Tensor  # [N, G] bfloat16
    bits: int  # of a code


def quantize(weight: Tensor, bits: int) -> QuantizedMatrix:
    """Quantizes a weight [N, K]. On the CPU, the kernels' `quantize` is faster and has the same results."""
    codes, scales, minimums = map_rows(lambda rows: _quantize_rows(rows, bits), weight)
    return QuantizedMatrix(codes, scales, minimums, bits)


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Returns the weight [N, K], computed in float32."""
    num_in = matrix.codes.shape[1]
    scales, minimums = (spread(x, GROUP_SIZES[matrix.bits], num_in) for x in (matrix.scales, matrix.minimums))
    return (matrix.codes.float() * scales + minimums).to(dtype)


def map_rows(convert: Callable[..., tuple[Tensor, ...]], weight: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Applies `convert` to chunks of rows of weight [N, K] and of `others` [N, ...]; returns the concatenated results.

    Each thread converts chunks of its own: torch's way, all threads on one operation after the other, waits for the
    slowest thread dozens of times a chunk, which on a busy machine takes minutes.
    """
    num_rows = max(1, _CHUNKS[weight.device.type] // weight.shape[1])
    chunks = [torch.split(tensor, num_rows) for tensor in (weight, *others)]
    with ThreadPoolExecutor(torch.get_num_threads() if weight.device.type == "cpu" else 1) as pool:
        parts = list(pool.map(convert, *chunks))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def spread(groups: Tensor, size: int, count: int) -> Tensor:
    """Repeats each number of `groups` [..., G] `size` times, up to `count`: [..., count], float32."""
    return groups.float().repeat_interleave(size, dim=-1)[..., :count]


def _quantize_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes rows of a weight [N, K]: codes [N, K], scales [N, G], minimums [N, G]."""
    num_out, num_in = weight.shape
    size = GROUP_SIZES[bits]
    padding = -num_in % size
    # Padded with each row's last number: it is in the group anyway, so it changes neither of the group's ends.
    full = torch.cat([weight, weight[:, -1:].expand(-1, padding)], dim=1).float()
    groups = full.view(-1, size).T.contiguous()  # so that sums over a group run down columns, which is fast
    best = fit = _Fit.through_ends(groups, bits)
    for _ in range(NUM_REFITS[bits]):
        fit = fit.refitted(groups)
        best = best.or_better(fit)
    best = best.or_better(_Fit.around_zero(groups, bits))  # which keeps zeros, and is better for some other groups
    codes = best.codes.to(torch.uint8).T.reshape(num_out, -1)[:, :num_in]
    return codes, best.scales.view(num_out, -1).bfloat16(), best.minimums.view(num_out, -1).bfloat16()


@dataclass(frozen=True, slots=True)
class _Fit:
    """One choice of scales and minimums for `groups`, [size, N * G], and the codes nearest to their numbers."""

    codes: Tensor  # [size, N * G], float32 as all tensors of this class
    scales: Tensor  # [N * G], each a bfloat16 number
    minimums: Tensor  # [N * G], each a bfloat16 number
    errors: Tensor  # [N * G], sums of squares
    max_code: int

    @classmethod
    def through_ends(cls, groups: Tensor, bits: int) -> "_Fit":
        """Fits code 0 at or just below the smallest number, and the largest code at the largest.

        The minimum is rounded down, never up: else numbers much closer to each other than to zero would all lie under
        it.
        """
        lowest, highest = groups.aminmax(dim=0)
        minimums = lowest.bfloat16()
        is_above = minimums.float() > lowest
        minimums = minimums.nextafter(torch.where(is_above, -torch.inf, minimums).bfloat16()).float()
        max_code = 2**bits - 1
        return cls._of(groups, (highest - minimums) / max_code, minimums, max_code)

    @classmethod
    def around_zero(cls, groups: Tensor, bits: int) -> "_Fit":
        """Fits the middle code at zero, exactly, and code 0 at the number farthest from it; scales may be negative."""
        lowest, highest = groups.aminmax(dim=0)
        farthest = torch.where(highest > -lowest, highest, lowest)
        scales = (farthest / -(2 ** (bits - 1))).bfloat16().float()
        return cls._of(groups, scales, scales * -(2 ** (bits - 1)), 2**bits - 1)

    @classmethod
    def _of(cls, groups: Tensor, scales: Tensor, minimums: Tensor, max_code: int) -> "_Fit":
        scales, minimums = scales.bfloat16().float(), minimums.bfloat16().float()
        divisors = torch.where(scales != 0, scales, torch.inf)
        codes = (groups - minimums).div_(divisors).round_().clamp_(0, max_code)
        errors = _sum(torch.addcmul(minimums, codes, scales).sub_(groups).square_())
        return cls(codes, scales, minimums, errors, max_code)

    def refitted(self, groups: Tensor) -> "_Fit":
        """Returns the fit of the least-squares line through (code, number), with the codes that are nearest to it."""
        mean_code, mean = _sum(self.codes) / len(groups), _sum(groups) / len(groups)
        centred = self.codes - mean_code
        covariance = _sum(centred * (groups - mean))
        scales = covariance / _sum(centred.square_()).clamp_min_(1e-9)
        return self._of(groups, scales, mean - scales * mean_code, self.max_code)

    def or_better(self, other: "_Fit") -> "_Fit":
        is_better = other.errors < self.errors
        return _Fit(
            torch.where(is_better, other.codes, self.codes),
            torch.where(is_better, other.scales, self.scales),
            torch.where(is_better, other.minimums, self.minimums),
            torch.where(is_better, other.errors, self.errors),
            self.max_code,
        )


def _sum(values: Tensor) -> Tensor:  # [size, N * G] -> [N * G]
    """Sums over the group, in the order in which the kernel does, too."""
    while len(values) > 1:
        upper, lower = values.chunk(2)
        values = upper + lower
    return values[0]
