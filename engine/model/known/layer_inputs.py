"""Inputs that each layer of a known decoder has of its own: whether they are known, and their parts."""

from typing import Any

from engine.model.decoder_parts import LayerInputsParts
from engine.model.fused_modules import FusedRMSNorm
from engine.model.known import code_fingerprint
from engine.model.known.linears import is_known_linear, parts_of_linear
from engine.model.known.norms import norm_parts

__all__ = ["are_layer_inputs_known", "has_layer_inputs", "layer_inputs_parts"]


def has_layer_inputs(decoder: Any) -> bool:
    """Whether layers of the decoder have inputs of their own."""
    return bool(getattr(decoder, "hidden_size_per_layer_input", 0))


def are_layer_inputs_known(decoder: Any) -> bool:
    """Whether nothing but what the C++ decoder does makes them."""
    embedding, projection = decoder.embed_tokens_per_layer, decoder.per_layer_model_projection
    is_known = code_fingerprint.is_scaled_embedding(embedding) and is_known_linear(projection)
    has_type = is_known and embedding.weight.dtype == projection.packed.dtype
    return has_type and isinstance(decoder.per_layer_projection_norm, FusedRMSNorm)


def layer_inputs_parts(decoder: Any) -> LayerInputsParts:
    """Returns the parts of what makes them."""
    embedding = decoder.embed_tokens_per_layer
    return LayerInputsParts(
        embedding.weight.detach(),
        code_fingerprint.embedding_scale(embedding),
        parts_of_linear(decoder.per_layer_model_projection),
        float(decoder.per_layer_model_projection_scale),
        norm_parts(decoder.per_layer_projection_norm),
        float(decoder.per_layer_input_scale),
    )
