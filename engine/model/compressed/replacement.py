"""Replaces the layers of models with compressed attention, whose code is known, and says where they cannot run."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from engine.attention.registry import AttentionCall
from engine.core.errors import UnsupportedModelError
from engine.model.compressed.attention import CompressedLayerAttention
from engine.model.compressed.hyper_connections import HyperConnection, HyperDecoderLayer, HyperHead
from engine.model.known.same_code import is_of
from engine.weights.module_replacement import replace_modules

__all__ = ["check_compressed", "replace_compressed_layers"]

_COMPRESSORS = "deepseek_v4.DeepseekV4CSACompressor", "deepseek_v4.DeepseekV4HCACompressor"


def replace_compressed_layers(model: nn.Module) -> None:
    """Replaces the layers of `model` in place where their code is known."""
    norm: Any = next((each.input_layernorm for each in model.modules() if _is_layer(each)), None)
    if norm is None:
        return
    replace_modules(model, _attention)
    replace_modules(model, lambda module: _connection(module, norm))
    replace_modules(model, lambda module: HyperDecoderLayer(module) if _is_layer(module) else None)


def check_compressed(model: str, calls: Sequence[AttentionCall], device: torch.device) -> None:
    """Raises UnsupportedModelError unless compressed attention can be computed as the model is run."""
    if device.type != "cpu" and any(call.compressed is not None for call in calls):
        raise UnsupportedModelError(
            f"{model} has compressed attention, which is computed on the CPU only: use --device cpu."
        )


def _is_layer(module: nn.Module) -> bool:
    return is_of(module, "deepseek_v4.DeepseekV4DecoderLayer")


def _attention(module: nn.Module) -> nn.Module | None:
    if not is_of(module, "deepseek_v4.DeepseekV4Attention") or not _is_compressor_known(cast(Any, module).compressor):
        return None
    return CompressedLayerAttention(module)


def _is_compressor_known(compressor: Any) -> bool:
    if compressor is None:
        return True
    indexer = getattr(compressor, "indexer", None)
    return is_of(compressor, *_COMPRESSORS) and (indexer is None or is_of(indexer, "deepseek_v4.DeepseekV4Indexer"))


def _connection(module: nn.Module, norm: nn.Module) -> nn.Module | None:
    if is_of(module, "deepseek_v4.DeepseekV4HyperConnection"):
        return HyperConnection(module, norm)
    return HyperHead(module, norm) if is_of(module, "deepseek_v4.DeepseekV4HyperHead") else None
