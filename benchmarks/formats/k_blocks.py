"""Blocks of 256 numbers, and those of levels, as llama.cpp stores them: what the package `gguf` reads but cannot make.

Scales are those of the largest numbers. llama.cpp tries several, so its files err a little less.
"""

from collections.abc import Callable

import numpy as np

__all__ = ["BLOCKS"]

_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def _half(numbers: np.ndarray) -> np.ndarray:  # [B] -> [B, 2] bytes
    halves: np.ndarray = numbers.astype(np.float16)[:, None]
    return halves.view(np.uint8)


def _quotient(numbers: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    """Returns 0 where the divisor is 0."""
    quotients = np.zeros_like(numbers)
    np.divide(numbers, divisors, out=quotients, where=divisors != 0)
    return quotients


def _shared(scales: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the factor [B] of a block, its groups' levels [B, G] of at most `top`, and what these stand for."""
    factors = (np.abs(scales).max(1) / top).astype(np.float16)
    levels = np.clip(np.round(_quotient(scales, factors[:, None].astype(np.float64))), -top, top).astype(np.int64)
    return factors, levels, levels * factors[:, None].astype(np.float64)


def _with_offsets(blocks: np.ndarray, size: int, bits: int, top: int) -> tuple[np.ndarray, ...]:
    """Returns codes [B, G, size] with factors and levels of scales and of offsets below zero."""
    groups = blocks.reshape(len(blocks), -1, size)
    low = np.minimum(groups.min(2), 0)
    factors, levels, scales = _shared((groups.max(2) - low) / ((1 << bits) - 1), top)
    low_factors, low_levels, offsets = _shared(-low, top)
    codes = np.round(_quotient(groups + offsets[..., None], scales[..., None]))
    return np.clip(codes, 0, (1 << bits) - 1).astype(np.int64), factors, levels, low_factors, low_levels


def _without_offsets(blocks: np.ndarray, bits: int, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes [B, 256] from 0 on, factors and levels of groups of 16."""
    groups, half = blocks.reshape(len(blocks), -1, 16), 1 << bits - 1
    factors, levels, scales = _shared(np.abs(groups).max(2) / (half - 0.5), top)
    codes = np.clip(np.round(_quotient(groups, scales[..., None])), -half, half - 1)
    return codes.reshape(len(blocks), -1).astype(np.int64) + half, factors, levels


def _stacked(codes: np.ndarray, bits: int) -> np.ndarray:  # [..., 8 / bits, S] -> [..., S] bytes, the first lowest
    shifts = np.arange(0, 8, bits)[:, None]
    packed: np.ndarray = (codes << shifts).sum(-2)
    return packed.reshape(len(codes), -1).astype(np.uint8)


def _levels_of_6_bits(levels: np.ndarray, low_levels: np.ndarray) -> np.ndarray:  # [B, 8] each -> [B, 12] bytes
    parts = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (levels, low_levels)]
    return np.concatenate([*parts, levels[:, 4:] & 15 | (low_levels[:, 4:] & 15) << 4], 1).astype(np.uint8)


def _q2_k(blocks: np.ndarray) -> list[np.ndarray]:
    codes, factors, levels, low_factors, low_levels = _with_offsets(blocks, 16, 2, 15)
    scales = (levels | low_levels << 4).astype(np.uint8)
    return [scales, _stacked(codes.reshape(-1, 2, 4, 32), 2), _half(factors), _half(low_factors)]


def _q3_k(blocks: np.ndarray) -> list[np.ndarray]:
    codes, factors, levels = _without_offsets(blocks, 3, 31)
    levels = levels + 32
    low = levels[:, :8] & 15 | (levels[:, 8:] & 15) << 4
    scales = np.concatenate([low, _stacked(levels.reshape(-1, 4, 4) >> 4, 2)], 1).astype(np.uint8)
    high = _stacked(codes.reshape(-1, 8, 32) >> 2, 1)
    return [high, _stacked(codes.reshape(-1, 2, 4, 32) & 3, 2), scales, _half(factors)]


def _q4_k(blocks: np.ndarray) -> list[np.ndarray]:
    codes, factors, levels, low_factors, low_levels = _with_offsets(blocks, 32, 4, 63)
    scales = _levels_of_6_bits(levels, low_levels)
    return [_half(factors), _half(low_factors), scales, _stacked(codes.reshape(-1, 4, 2, 32), 4)]


def _q5_k(blocks: np.ndarray) -> list[np.ndarray]:
    codes, factors, levels, low_factors, low_levels = _with_offsets(blocks, 32, 5, 63)
    packed = [_stacked(codes >> 4, 1), _stacked((codes & 15).reshape(-1, 4, 2, 32), 4)]
    return [_half(factors), _half(low_factors), _levels_of_6_bits(levels, low_levels), *packed]


def _q6_k(blocks: np.ndarray) -> list[np.ndarray]:
    codes, factors, levels = _without_offsets(blocks, 6, 127)
    low = _stacked(codes.reshape(-1, 2, 2, 64) & 15, 4)
    high = _stacked(codes.reshape(-1, 2, 4, 32) >> 4, 2)
    return [low, high, levels.astype(np.int8).view(np.uint8), _half(factors)]


def _nearest_level(numbers: np.ndarray) -> np.ndarray:
    return np.searchsorted((_LEVELS[1:] + _LEVELS[:-1]) / 2, numbers)


def _iq4_nl(blocks: np.ndarray) -> list[np.ndarray]:
    factors = (np.abs(blocks).max(1) / 127).astype(np.float16)
    codes = _nearest_level(_quotient(blocks, factors[:, None].astype(np.float64)))
    return [_half(factors), _stacked(codes.reshape(-1, 1, 2, 16), 4)]


def _iq4_xs(blocks: np.ndarray) -> list[np.ndarray]:
    groups = blocks.reshape(len(blocks), 8, 32)
    factors, levels, scales = _shared(np.abs(groups).max(2) / 127, 31)
    codes, levels = _nearest_level(_quotient(groups, scales[..., None])), levels + 32
    high = _stacked((levels >> 4).reshape(-1, 2, 4, 1), 2)
    low = _stacked((levels & 15).reshape(-1, 4, 2, 1), 4)
    return [_half(factors), high, low, _stacked(codes.reshape(-1, 8, 2, 16), 4)]


BLOCKS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    **{"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs}
}
"""Type -> how blocks [B, numbers] in float64 are stored: parts [B, bytes], which follow one another."""
