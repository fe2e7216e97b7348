"""Latent attention over the latents themselves: the KV cache then has one latent of each token and layer for all heads.

Models with such attention expand latents to keys and values in a method of their own, whatever else their code does.
Where that is known, it is replaced by one that hands on the latents, and queries and outputs are multiplied in its
place (`engine.weights.latent_heads`).
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

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

    None are where a cache of `kv_dtype` cannot have values among the numbers of keys.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for each in [*_latent_layers(model)]:
        attention = cast(Any, each)
        rank = attention.kv_lora_rank
        if is_quantized(kv_dtype) and not shares_rows(rank, attention.qk_rope_head_dim):
            logger.warning(
                "keys and values of all heads are cached: of few bits, latents of %d numbers cannot be", rank
            )
            break
        projection = attention._modules[_PROJECTION]
        replaced[each] = projection
        setattr(each, _PROJECTION, LatentHeads(projection.weight, attention.num_heads, attention.qk_nope_head_dim))
        setattr(each, _EXPANSION, _joined)
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


def _latent_layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        expansion = getattr(type(module), _EXPANSION, None)
        if expansion is None or not is_same(expansion, _known_expansion()):
            continue
        projection = module._modules.get(_PROJECTION)
        if isinstance(projection, nn.Linear) and is_linear(projection) and projection._parameters["bias"] is None:
            yield module


def _known_expansion() -> object:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3  # whose code others do not load

    return modeling_deepseek_v3.DeepseekV3Attention.expand_kv


def _joined(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the key and the value [1, 1, T, ...] of all heads."""
    key = torch.cat((latents, rotated), dim=-1)
    return key, key[..., : latents.shape[-1]]
