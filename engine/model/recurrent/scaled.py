"""Fused parts whose products are multiplied by numbers, as in Falcon-H1: of some columns, or of all."""

from typing import Any

import torch
from torch import Tensor

from engine.model.fused_modules import FusedAttention, FusedMLP, ProductFactors
from engine.model.fused_recurrent import FusedMamba2
from engine.model.known.code_fingerprint import SCALED_ATTENTION, SCALED_MLP
from engine.model.known.same_code import is_of
from engine.weights.merged_rows import interleaved

__all__ = ["constant_factors", "scaled_attention", "scaled_mamba2", "scaled_mlp"]


def scaled_mlp(fused: FusedMLP, mlp: Any) -> FusedMLP:
    """Returns the fused MLP with what the one that it was made of multiplies its gates and its results by, if it
    does."""
    if is_of(mlp, SCALED_MLP):
        num_inner = fused.gate_up_proj.out_features // 2
        gates, ups = constant_factors(num_inner, mlp.gate_multiplier), torch.ones(num_inner)
        last = constant_factors(fused.down_proj.out_features, mlp.down_multiplier)
        fused.factors = ProductFactors(interleaved([gates, ups]), last)
    return fused


def scaled_attention(fused: FusedAttention, attention: Any) -> FusedAttention:
    """Returns the fused attention with what the one that it was made of multiplies its keys by, if it does."""
    if is_of(attention, SCALED_ATTENTION):
        queries, keys, values = (torch.ones(count * fused.head_size) for count in fused.head_counts)
        fused.factors = ProductFactors(torch.cat([queries, keys * float(attention.key_multiplier), values]))
    return fused


def scaled_mamba2(layer: Any) -> FusedMamba2:
    """Returns a fused layer of Mamba-2 with its numbers."""
    factors = ProductFactors(layer.mup_vector.detach().flatten().to(torch.float32, copy=True))
    return FusedMamba2(layer, factors, float(layer.ssm_in_multiplier))


def constant_factors(size: int, factor: float) -> Tensor:
    """Returns a factor for each of as many columns."""
    return torch.full((size,), float(factor))
