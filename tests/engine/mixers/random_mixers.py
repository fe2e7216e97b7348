"""Mixers of every kind with random tokens, whole or in part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.mixers.convolution import Convolution
from engine.mixers.dynamic_convolution import DynamicConvolution
from engine.mixers.gated_delta_rule import GatedDeltaRule
from engine.mixers.linear_attention import LinearAttention
from engine.mixers.mamba2_layer import Mamba2Layer
from engine.mixers.mamba2_scan import Mamba2Scan
from engine.mixers.real_gated_recurrence import RealGatedRecurrence
from engine.mixers.registry import Mixer
from engine.mixers.row_window import RowWindow
from engine.mixers.selective_scan import SelectiveScan
from engine.mixers.short_convolution import ShortConvolution
from engine.mixers.token_window import TokenWindow

CPU = torch.device("cpu")
NUM_TOKENS = 33
CHANNELS = 24


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def convolution(seed: int, dtype: torch.dtype = torch.float32, is_gated: bool = False) -> Convolution:
    x = draw(NUM_TOKENS, CHANNELS, seed=seed, dtype=dtype)
    return Convolution(x, draw(4, CHANNELS), draw(CHANNELS), is_gated)


def short_convolution(seed: int, dtype: torch.dtype = torch.float32) -> ShortConvolution:
    rows = draw(NUM_TOKENS, 3 * CHANNELS, seed=seed, dtype=dtype)
    return ShortConvolution(rows, draw(3, CHANNELS), draw(CHANNELS))


def dynamic_convolution(seed: int) -> DynamicConvolution:
    weights = draw(NUM_TOKENS, 4, 3, seed=seed)  # of each group of channels
    return DynamicConvolution(draw(NUM_TOKENS, CHANNELS, seed=seed), weights, draw(4, CHANNELS))


def linear_attention(seed: int, has_rate: bool = True, num_decays: int = 1) -> LinearAttention:
    query, key = draw(NUM_TOKENS, 2, 19, seed=seed), draw(NUM_TOKENS, 2, 19, seed=seed + 50)
    return LinearAttention(
        functional.normalize(query, dim=-1),
        functional.normalize(key, dim=-1),
        draw(NUM_TOKENS, 6, 21, seed=seed),
        draw(NUM_TOKENS, 6, num_decays, seed=seed).sigmoid(),
        draw(NUM_TOKENS, 6, seed=seed + 90).sigmoid() if has_rate else None,
    )


def gated_delta_rule(seed: int, dtype: torch.dtype = torch.float32) -> GatedDeltaRule:
    numbers = draw(6).abs().neg(), draw(6, seed=3)
    return GatedDeltaRule(
        draw(NUM_TOKENS, 2 * 2 * 19 + 6 * 21, seed=seed).to(dtype),
        draw(NUM_TOKENS, 6, seed=seed, dtype=dtype),
        draw(NUM_TOKENS, 6, seed=seed + 7, dtype=dtype),
        *numbers,
        num_groups=2,
        key_size=19,
    )


def mamba2_scan(seed: int, dtype: torch.dtype = torch.float32) -> Mamba2Scan:
    return Mamba2Scan(
        draw(NUM_TOKENS, 6 * 21 + 2 * 2 * 19, seed=seed, dtype=dtype),
        draw(NUM_TOKENS, 6, seed=seed + 7, dtype=dtype),
        draw(6).abs().neg(),
        draw(6, seed=3).to(dtype).float(),
        draw(6, seed=4),
        least_time=0.3,
        most_time=1.7,
        num_groups=2,
        state_size=19,
    )


def mamba2_layer(seed: int, dtype: torch.dtype = torch.float32, has_norm: bool = True) -> Mamba2Layer:
    scan, channels = mamba2_scan(seed, dtype), 6 * 21 + 2 * 2 * 19
    return Mamba2Layer(
        draw(NUM_TOKENS, 6 * 21 + channels + 6, seed=seed, dtype=dtype),
        draw(4, channels),
        draw(channels),
        *scan[2:8],
        draw(6 * 21, seed=5, dtype=dtype) if has_norm else None,
        1e-5,
        state_size=19,
    )


def selective_scan(seed: int, state_size: int = 16) -> SelectiveScan:
    x, time_step = draw(NUM_TOKENS, CHANNELS, seed=seed), draw(NUM_TOKENS, CHANNELS, seed=seed + 9).abs()
    write, read = draw(NUM_TOKENS, state_size, seed=seed), draw(NUM_TOKENS, state_size, seed=seed + 5)
    return SelectiveScan(x, time_step, -draw(CHANNELS, state_size).abs(), write, read)


def real_gated_recurrence(seed: int, dtype: torch.dtype = torch.float32) -> RealGatedRecurrence:
    """Returns one of heads with 21 channels each."""
    x, gates = draw(NUM_TOKENS, 63, seed=seed, dtype=dtype), draw(NUM_TOKENS, 3, 2, 21, seed=seed + 5, dtype=dtype)
    return RealGatedRecurrence(x, gates, -draw(63).abs(), torch.arange(NUM_TOKENS) == 0)


def token_window(seed: int) -> TokenWindow:
    return TokenWindow(torch.randint(50, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed)), 3)


MIXERS: dict[str, Callable[[int], Mixer]] = {
    "convolution": convolution,
    "convolution in bfloat16": lambda seed: convolution(seed, torch.bfloat16),
    "short convolution": short_convolution,
    "dynamic convolution": dynamic_convolution,
    "gated delta rule": linear_attention,
    "gated delta rule from projections": gated_delta_rule,
    "gated delta rule from projections in bfloat16": lambda seed: gated_delta_rule(seed, torch.bfloat16),
    "Kimi delta attention": lambda seed: linear_attention(seed, num_decays=19),
    "Mamba-2": lambda seed: linear_attention(seed, has_rate=False),
    "Mamba-2 from projections": mamba2_scan,
    "Mamba-2 from projections in bfloat16": lambda seed: mamba2_scan(seed, torch.bfloat16),
    "Mamba": selective_scan,
    "token window": token_window,
    "row window": lambda seed: RowWindow(draw(NUM_TOKENS, CHANNELS, seed=seed), 2),
    "real-gated recurrence": real_gated_recurrence,
    "real-gated recurrence in bfloat16": lambda seed: real_gated_recurrence(seed, torch.bfloat16),
}
PER_TOKEN = {"x", "rows", "qkv", "query", "key", "value", "decay", "rate", "time_step", "write", "read"} | {
    "gates",
    "is_first",
    "token_ids",
    "weights",
}


def joined(mixers: list[Any], ranges: list[range]) -> Any:
    """Returns one mixer with the tokens in these ranges of each, one after the other."""
    fields = mixers[0]._asdict()
    for name in PER_TOKEN & fields.keys():
        parts = [getattr(mixer, name) for mixer in mixers]
        if parts[0] is not None:
            fields[name] = torch.cat([part[own.start : own.stop] for part, own in zip(parts, ranges, strict=True)])
    return type(mixers[0])(**fields)
