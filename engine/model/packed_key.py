"""Which file of a packed cache stands for the configured model: a hash of all that loading depends on.

What is not sure to leave the packed weights alone counts: a file that is not found costs a load.
"""

import hashlib
import importlib.metadata
import platform
import sys
import time
from pathlib import Path

import torch

from engine.checkpoint.hub import snapshot
from engine.checkpoint.local import is_gguf, is_local
from engine.checkpoint.weight_source import brings_head
from engine.core.config import EngineConfig
from engine.host.code_digest import digests_of_packages, library_settings
from engine.kernels import load_kernels
from engine.kernels.cpu_features import cpu_flags

__all__ = ["packed_key", "wants_head"]

_CODE = ("attention", "checkpoint", "host", "kernels", "mixers", "model", "runner", "weights")
"""Packages of the engine whose code runs when a model is loaded."""
_SUFFIXES = (".bin", ".gguf", ".jinja", ".json", ".model", ".safetensors", ".txt")
_TICK_S = 0.05
"""Longer than the steps of the clock by which file systems tell times of change."""


def packed_key(config: EngineConfig) -> str | None:
    """Returns the name of the model's file, 32 hexadecimal digits; None for a model that no file can stand for: on
    another device than the CPU, without kernels, with a draft model, or with the checkpoint's own code.

    Also None if files changed just now: they might change once more without another time. Raises ModelError or OSError.
    """
    has_drafts = config.draft_model is not None or config.draft_quantization != "none"
    is_on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    if config.trust_remote_code or has_drafts or not is_on_cpu or (kernels := load_kernels()) is None:
        return None
    checkpoint = _checkpoint(config)
    if checkpoint is None:
        return None
    parts = {
        "checkpoint": checkpoint,
        "dtype": config.dtype,
        "head": wants_head(config),
        "quantization": config.quantization,
        "gguf_activations": config.gguf_activations,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kernels": kernels.path.name,
        "versions": [importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")],
        "python": sys.version,
        "machine": platform.machine(),
        "cpu": sorted(cpu_flags()),
        "environment": library_settings(),
        "code": digests_of_packages(_CODE),
    }
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def wants_head(config: EngineConfig) -> bool:
    """Whether the model is to draft with an MTP head that its checkpoint brings."""
    return config.may_load_head and brings_head(config.model, config.revision)


def _checkpoint(config: EngineConfig) -> object | None:
    """Returns what tells the checkpoint's content apart: its commit, or sizes and times of its files."""
    if not is_local(config.model):
        return config.model, snapshot(config.model, config.revision, ["config.json"]).name
    path = Path(config.model)
    folder = path.parent if is_gguf(config.model) else path
    files = sorted(each for each in folder.iterdir() if each.suffix in _SUFFIXES)
    stats = [each.stat() for each in files]
    if max((each.st_ctime for each in stats), default=0) > time.time() - _TICK_S:
        return None
    return str(path.resolve()), [
        (file.name, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for file, each in zip(files, stats, strict=True)
    ]
