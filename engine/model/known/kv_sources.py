"""Where the keys and values of known attentions come from."""

from typing import Any

from torch import nn

from engine.attention.kv_source import OWN_KV, KVSource, Values
from engine.model.known.same_code import is_of

__all__ = ["SHARING_KEYS", "has_own_keys", "kv_source_of", "norms_values"]

SHARING_KEYS = ("gemma4.Gemma4TextAttention", "gemma4_unified.Gemma4UnifiedTextAttention")
"""Attentions some of which take the keys and values of an earlier layer of their type, or their keys as values. They
norm values without a weight."""


def kv_source_of(attention: Any) -> KVSource:
    """Returns where an attention's keys and values come from."""
    if not is_of(attention, *SHARING_KEYS):
        return OWN_KV
    if attention.is_kv_shared_layer:
        return KVSource("of another layer", attention.layer_type)
    values: Values = "projected" if attention.v_proj is not None else "of keys"
    return KVSource(values, attention.layer_type, bool(attention.store_full_length_kv))


def has_own_keys(attention: nn.Module) -> bool:
    """Whether keys and values of the attention are its own."""
    return kv_source_of(attention).values != "of another layer"


def norms_values(attention: nn.Module) -> bool:
    """Whether the attention norms its values, which are its own, by norms without a weight."""
    return is_of(attention, *SHARING_KEYS) and has_own_keys(attention)
