"""Replaces the layers of models with gated streams and n-grams, whose code is known."""

from typing import Any, cast

from torch import nn

from engine.model.gated_streams.attention import GatedSparseAttention
from engine.model.gated_streams.gated_residual import GatedResidual
from engine.model.gated_streams.ngram_layer import NGramLayer
from engine.model.known.same_code import is_of, rotate_of
from engine.weights.module_replacement import replace_modules

__all__ = ["replace_gated_streams"]


def replace_gated_streams(model: nn.Module) -> None:
    """Replaces the layers of `model` in place where their code is known. Its indexers are replaced before."""
    rotary_emb = next((each for each in model.modules() if is_of(each, "qwen4_exp.Qwen4ExpTextRotaryEmbedding")), None)
    if rotary_emb is not None:
        replace_modules(model, lambda module: _replacement(module, rotary_emb))


def _replacement(module: nn.Module, rotary_emb: nn.Module) -> nn.Module | None:
    if is_of(module, "qwen4_exp.Qwen4ExpTextGatedResidual"):
        return GatedResidual(module)
    if is_of(module, "qwen4_exp.Qwen4ExpTextPLELayer") and _is_input_known(cast(Any, module)):
        return NGramLayer(module)
    if is_of(module, "qwen4_exp.Qwen4ExpTextAttention"):
        return GatedSparseAttention(module, rotate_of(module), rotary_emb)
    return None


def _is_input_known(layer: Any) -> bool:
    return is_of(layer.ple_embedding, "qwen4_exp.Qwen4ExpTextNGramEmbedding") and layer.conv1d.bias is None
