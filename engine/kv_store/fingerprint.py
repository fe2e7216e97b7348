"""Fingerprint of all that the KV of a token depends on beside the tokens: weights, format, and the order of every sum.

What is not sure to leave the bits alone counts: a store that is found by too few costs time, by too many the truth.
"""

import hashlib
import os
import platform
import sys
from itertools import chain
from pathlib import Path

import torch
import transformers

import engine
from engine.attention.kv_cache import KVCache
from engine.checkpoint.local import is_local
from engine.core.config import EngineConfig, EngineInfo
from engine.kernels import load_kernels
from engine.kernels.cpu_features import cpu_flags

_CODE = ("attention", "checkpoint", "host", "kernels", "model", "runner", "weights")
"""Packages of the engine that compute, or that read numbers."""
_LIBRARIES = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_")
"""Beginnings of the environment variables by which libraries are told how to compute."""


def kv_fingerprint(config: EngineConfig, info: EngineInfo, cache: KVCache) -> str:
    """Returns a hash, in 32 hexadecimal digits."""
    kernels = load_kernels()
    parts = {
        "weights": info.weights_fingerprint,
        "architecture": info.architecture,
        "forward": info.forward,
        "attention": info.attention,
        "linear": info.linear,
        "quantization": config.quantization,
        "dtype": info.dtype,
        "block": [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in chain.from_iterable(cache.layers)],
        "kernels": kernels.path.name if kernels else torch.get_num_threads(),
        "torch": torch.__config__.show(),
        "transformers": transformers.__version__,
        "python": sys.version,
        "machine": platform.machine(),
        "cpu": sorted(cpu_flags()),
        "environment": sorted(item for item in os.environ.items() if item[0].startswith(_LIBRARIES)),
        "code": [_digests_of(Path(engine.__file__).parent / package) for package in _CODE],
        "remote code": _remote_code(config),
    }
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _remote_code(config: EngineConfig) -> object:
    """Returns what tells the code apart that the checkpoint brings, if that may run."""
    if not config.trust_remote_code:
        return None
    return _digests_of(Path(config.model)) if is_local(config.model) else (config.model, config.revision)


def _digests_of(root: Path) -> list[tuple[str, str]]:
    """Returns the Python files below a directory, by their names there, and hashes of their contents."""
    paths = sorted(root.rglob("*.py"))
    return [(str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]
