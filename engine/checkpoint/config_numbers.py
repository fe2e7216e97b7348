"""Whether the numbers of a config.json can be those of a model, before anything is made of them; torch-free.

A number of layers of a million keeps transformers busy for hours, and a base of rotary embeddings of zero gives a model
that computes no numbers.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from engine.core.errors import ModelError

__all__ = ["check_numbers", "num_layers"]

_MAX_LAYERS = 4096
_MAX_EXPERTS = 1 << 16
_MAX_CONTEXT = 2**31 - 1
_MAX_DEPTH = 8
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_BASES = ("rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta", "rotary_emb_base")


def check_numbers(config: Mapping[str, Any], model: str) -> None:
    """Raises ModelError for a number of config.json that no model has, with its name."""
    for name, value in _numbers_of(config):
        problem = _problem_of(name, value)
        if problem:
            raise ModelError(f"config.json of {model}: {name} is {str(value)[:64]}, and {problem}; mend it.")


def num_layers(config: Mapping[str, Any]) -> int:
    """Returns the largest number of layers that config.json names; 0 if it names none."""
    return max((value for name, value in _numbers_of(config) if name in _LAYERS and type(value) is int), default=0)


def _problem_of(name: str, value: float) -> str | None:
    if name in _LAYERS and not 0 <= value <= _MAX_LAYERS:
        return f"a model has at most {_MAX_LAYERS} layers"
    if "experts" in name and value > _MAX_EXPERTS:
        return f"a layer has at most {_MAX_EXPERTS} experts"
    if name in _CONTEXTS and value > _MAX_CONTEXT:
        return f"a context has at most {_MAX_CONTEXT} tokens"
    if name in _BASES and not 0 < value < math.inf:
        return "rotary embeddings have a finite base above 0"
    if name.endswith(("_eps", "_epsilon")) and not 0 <= value < math.inf:
        return "what a norm adds is finite and at least 0"
    is_unread = name.endswith("max_length")  # tokenizers' settings have 10**30 for none, and some tools copy them
    return "no size is as large" if type(value) is int and abs(value) >= 2**63 and not is_unread else None


def _numbers_of(config: Any, depth: int = 0) -> Iterator[tuple[str, float]]:
    """Yields the names and values of all numbers."""
    if depth > _MAX_DEPTH or not isinstance(config, Mapping):
        return
    for name, value in config.items():
        if isinstance(name, str) and isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
        yield from _numbers_of(value, depth + 1)
