"""Latent attention over the latents themselves: the KV cache then has one latent of each token and layer for all heads.

Models with such attention expand latents to keys and values in a method of their own, whatever else their code does.
Where that is known, it is replaced by one that hands on the latents, and queries and outputs are multiplied in its
place (`engine.weights.latent_heads`).
"""

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.kv_format import is_quantized, shares_rows
from engine.checkpoint.adapters.settings import read_settings
from engine.core.adapters import AdapterSource
from engine.core.errors import AdapterError
from engine.model.known.same_code import is_same
from engine.weights.latent_heads import LatentHeads
from engine.weights.linear import is_linear

__all__ = ["are_expanded_by", "expand_latents", "has_latents", "keep_latents"]

logger = logging.getLogger(__name__)

_PROJECTION, _EXPANSION = "kv_b_proj", "expand_kv"


def keep_latents(model: nn.Module, kv_dtype: torch.dtype) -> dict[nn.Module, nn.Module]:
    """Has attention layers of `model` hand on latents; returns these layers, each with its module that is replaced.

    None are, with a warning, where their code is not known, or a cache of `kv_dtype` cannot have values among the
    numbers of keys.
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m._modules.get(_PROJECTION), nn.Linear)]
    if not all(map(_is_known, layers)):
        logger.warning("keys and values of all heads are cached: this model's way of expanding latents is not known")
        return {}
    if is_quantized(kv_dtype) and not all(shares_rows(m.kv_lora_rank, m.qk_rope_head_dim) for m in layers):
        logger.warning("keys and values of all heads are cached: latents of this size cannot be kept in few bits")
        return {}
    replaced = {attention: attention._modules[_PROJECTION] for attention in layers}
    for attention, projection in replaced.items():
        heads = LatentHeads(projection.weight, attention.num_heads, attention.qk_nope_head_dim)
        setattr(attention, _PROJECTION, heads)
        setattr(attention, _EXPANSION, _joined)
    return replaced


def expand_latents(replaced: dict[nn.Module, nn.Module]) -> None:
    """Takes back what `keep_latents` did."""
    for attention, projection in replaced.items():
        setattr(attention, _PROJECTION, projection)
        delattr(attention, _EXPANSION)


def are_expanded_by(adapters: Iterable[AdapterSource]) -> bool:
    """Whether one of the adapters may add to what expands latents, which then stays a linear layer. Those that cannot
    be read are told of where they are loaded."""
    for each in adapters:
        with contextlib.suppress(AdapterError):
            if read_settings(Path(each.path)).may_mean(_PROJECTION):
                return True
    return False


def has_latents(model: nn.Module) -> bool:
    """Whether layers of the model hand on latents."""
    return any(isinstance(each, LatentHeads) for each in model.modules())


def _is_known(attention: nn.Module) -> bool:
    expansion, projection = getattr(type(attention), _EXPANSION, None), attention._modules[_PROJECTION]
    is_plain = projection is not None and is_linear(projection) and projection._parameters["bias"] is None
    return is_plain and is_same(expansion, _known_expansion())


def _known_expansion() -> object:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3  # whose code others do not load

    return modeling_deepseek_v3.DeepseekV3Attention.expand_kv


def _joined(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the key and the value [1, 1, T, ...] of all heads."""
    key = torch.cat((latents, rotated), dim=-1)
    return key, key[..., : latents.shape[-1]]
