"""How long a context a model can have, from its configuration."""

from collections.abc import Sequence

from transformers import PreTrainedConfig

from engine.core.errors import UnsupportedModelError
from engine.mixers.state import StateShape

__all__ = ["context_limit"]

_LIMIT_WITHOUT_POSITIONS = 1 << 17
"""Longest context of a model that knows no positions, such as Mamba, whose states take no more memory with more."""


def context_limit(text_config: PreTrainedConfig, states: Sequence[StateShape]) -> int:
    """Returns the longest context whose positions mean the same in every batch. Raises UnsupportedModelError if the
    configuration tells no limit, unless the model has recurrent states, which need none.

    Rotary frequencies that change with the longest sequence of a batch (dynamic, longrope), and chunked attention,
    are plain below their threshold: contexts are limited to it.
    """
    limit = getattr(text_config, "max_position_embeddings", _LIMIT_WITHOUT_POSITIONS if states else None)
    if limit is None:
        raise UnsupportedModelError(
            f"The configuration of {text_config.model_type} has no max_position_embeddings, so the longest context it "
            "can have is not known."
        )
    limits = [int(limit)]
    rope = getattr(text_config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):  # one for all layers, or one for each kind of layer
        if isinstance(each, dict) and each.get("rope_type") in ("dynamic", "longrope"):
            limits.append(int(each.get("original_max_position_embeddings") or limits[0]))
    if "chunked_attention" in (getattr(text_config, "layer_types", None) or ()):
        limits.append(int(text_config.attention_chunk_size))
    return min(limits)
