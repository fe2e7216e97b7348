"""The rotary embeddings of a decoder whose frequencies never change, and which of them each layer takes."""

from typing import Any

import torch

from engine.model import code_fingerprint
from engine.model.decoder_parts import RotaryParts

__all__ = ["has_known_rotations", "rotations_of"]


def has_known_rotations(decoder: Any) -> bool:
    """Whether `rotations_of` knows what the decoder's rotary embedding computes."""
    rotary = decoder.rotary_emb
    is_one = code_fingerprint.is_rotary_embedding(rotary) or code_fingerprint.is_half_rotary_embedding(rotary)
    return is_one or code_fingerprint.is_rotary_embedding_by_type(rotary)


def rotations_of(decoder: Any) -> tuple[tuple[RotaryParts, ...], list[int]]:
    """Returns the rotary embeddings of a known decoder, and the number of each layer's."""
    rotary, num_layers = decoder.rotary_emb, len(decoder.layers)
    if not code_fingerprint.is_rotary_embedding_by_type(rotary):
        return (_parts(rotary, ""),), [0] * num_layers
    types = decoder.config.layer_types[:num_layers]
    known = sorted({*types})
    return tuple(_parts(rotary, f"{each}_") for each in known), [known.index(each) for each in types]


def _parts(rotary: Any, prefix: str) -> RotaryParts:
    inv_freq = getattr(rotary, f"{prefix}inv_freq").to(torch.float32)
    return RotaryParts(inv_freq, getattr(rotary, f"{prefix}attention_scaling"))
