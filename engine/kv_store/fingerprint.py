"""Fingerprint of all that KV and states depend on beside the tokens: weights, format, and the order of every sum.

What is not sure to leave the bits alone counts: a store that is found by too few costs time, by too many the truth.
"""

import hashlib
import importlib.metadata
import platform
import sys
from itertools import chain
from pathlib import Path

import torch

from engine.attention.kv_cache import KVCache
from engine.checkpoint.local import is_local
from engine.core.config import EngineConfig, EngineInfo
from engine.host.code_digest import digests_of_packages, digests_of_python, library_settings
from engine.kernels import load_kernels
from engine.kernels.cpu_features import cpu_flags
from engine.mixers.state import StateCache

_CODE = ("attention", "checkpoint", "host", "kernels", "mixers", "model", "runner", "weights")
"""Packages of the engine that compute, or that read numbers."""


def kv_fingerprint(config: EngineConfig, info: EngineInfo, cache: KVCache, states: StateCache | None = None) -> str:
    """Returns a hash, in 32 hexadecimal digits. `states` are those of a model that has some."""
    kernels = load_kernels()
    parts = {
        "weights": info.weights_fingerprint,
        "architecture": info.architecture,
        "forward": info.forward,
        "attention": info.attention,
        "linear": info.linear,
        "quantization": config.quantization,
        "gguf_activations": config.gguf_activations,
        "dtype": info.dtype,
        "block": [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in chain.from_iterable(cache.layers)],
        "groups": cache.groups,
        "index keys": [each if each is None else (each.dtype, tuple(each.shape[1:])) for each in cache.index_keys],
        "compressed": [[(each.dtype, tuple(each.shape[1:])) for each in layer] for layer in cache.compressed],
        "hidden states": None if cache.hidden is None else (cache.hidden.dtype, tuple(cache.hidden.shape[1:])),
        "made by": info.hidden_fingerprint,
        "states": [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in states.states] if states else [],
        "kernels": kernels.path.name if kernels else torch.get_num_threads(),
        "torch": torch.__config__.show(),
        "transformers": importlib.metadata.version("transformers"),
        "python": sys.version,
        "machine": platform.machine(),
        "cpu": sorted(cpu_flags()),
        "environment": library_settings(),
        "code": digests_of_packages(_CODE),
        "remote code": _remote_code(config),
    }
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _remote_code(config: EngineConfig) -> object:
    """Returns what tells the code apart that the checkpoint brings, if that may run."""
    if not config.trust_remote_code:
        return None
    return digests_of_python(Path(config.model)) if is_local(config.model) else (config.model, config.revision)
