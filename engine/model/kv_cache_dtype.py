"""The type of the KV cache: the model's own, or one with fewer bits where it can be kept in it."""

from collections.abc import Sequence

import torch

from engine.attention.kv_cache import LayerShape
from engine.attention.kv_format import KV_DTYPES, MULTIPLE, is_quantized
from engine.core.errors import ConfigError

__all__ = ["choose_kv_dtype", "kv_dtype_named"]


def kv_dtype_named(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the type that `--kv-cache-dtype name` means for a model of `dtype`."""
    return dtype if name == "auto" else KV_DTYPES[name]


def choose_kv_dtype(name: str, dtype: torch.dtype, architecture: str, layers: Sequence[LayerShape]) -> torch.dtype:
    """Returns the type that `--kv-cache-dtype name` asks for; `dtype` is the model's own.

    Raises ConfigError where attention of this model cannot read such a cache.
    """
    chosen = kv_dtype_named(name, dtype)
    sizes = {size for layer in layers for size in (layer.head_size, layer.head_size_v) if size % MULTIPLE}
    if is_quantized(chosen) and sizes:
        raise ConfigError(
            f"--kv-cache-dtype {name} needs keys and values of a multiple of {MULTIPLE} numbers, and those of "
            f"{architecture} have {', '.join(map(str, sorted(sizes)))}; use bfloat16 or leave it out."
        )
    return chosen
