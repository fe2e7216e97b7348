"""Where weights come from that transformers does not read itself: tensor -> weight, as a file stores it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.gguf.blocks import Expander
from engine.checkpoint.gguf.header import read_gguf
from engine.checkpoint.gguf.weights import gguf_weights
from engine.checkpoint.hub import optional_file, snapshot
from engine.checkpoint.local import folder_of, is_gguf, is_local, read_config
from engine.checkpoint.published.scheme import check_scheme, quark_weights, scheme_of
from engine.checkpoint.published.weights import published_weights
from engine.checkpoint.safetensors_files import IsWanted, read_wanted, tensor_names

__all__ = ["brings_head", "brings_unknown_head", "needs_float32", "stored_weights", "weights_beside"]

_OF_HEADS = re.compile(r"\.eh_proj\.|(?:^|\.)mtp\.fc\.|\.mtp_layers\.0\.input_proj\.")
"""Finds names of the projections of MTP heads, whose parts `engine.model.drafting.mtp_head` names."""
_OF_UNKNOWN_HEADS = re.compile(r"(?:^|\.)mtp\.\d+\.")
"""Finds names of the MTP layers of DeepSeek-V4."""
_WITHIN_BFLOAT16 = ("mxfp4",)


def stored_weights(
    model: str, revision: str | None, dtype: torch.dtype, expander: Expander | None = None
) -> dict[str, Tensor] | None:
    """Returns the weights of a checkpoint, to be read in `dtype` one by one; None if its files have plain numbers,
    which transformers reads. `expander` reads the blocks of GGUF, in the place of torch. Raises ModelError."""
    if is_gguf(model):
        return gguf_weights(read_gguf(Path(model)), dtype, expander)
    scheme = _scheme_of(model, revision)
    if scheme is None:
        return None
    files = ("*.safetensors", "*.safetensors.index.json")
    folder = folder_of(model) if is_local(model) else snapshot(model, revision, files)
    return published_weights(folder, scheme, dtype)


def brings_head(model: str, revision: str | None) -> bool:
    """Whether the checkpoint has tensors that are named as those of an MTP head are; False for one that is damaged."""
    return _has_names(model, revision, _OF_HEADS)


def brings_unknown_head(model: str, revision: str | None) -> bool:
    """Whether the checkpoint has MTP layers in a form that is not known here; False for one that is damaged."""
    return _has_names(model, revision, _OF_UNKNOWN_HEADS)


def _has_names(model: str, revision: str | None, pattern: re.Pattern[str]) -> bool:
    if is_gguf(model):
        return False
    try:
        names = tensor_names(lambda name: optional_file(model, revision, name))
    except Exception:  # what is wrong with it is said when it is loaded
        return False
    return any(map(pattern.search, names))


def weights_beside(model: str, revision: str | None, dtype: torch.dtype, is_wanted: IsWanted) -> dict[str, Tensor]:
    """Returns the weights with the wanted names, which are those of parts that transformers leaves out. GGUF files have
    other names: of these there are none. Raises ModelError."""
    if is_gguf(model):
        return {}
    if _scheme_of(model, revision) is not None:
        stored = stored_weights(model, revision, dtype) or {}
        return {name: tensor for name, tensor in stored.items() if is_wanted(name)}
    return read_wanted(lambda name: optional_file(model, revision, name), is_wanted)


def needs_float32(model: str, revision: str | None) -> bool:
    """Whether 16 bits would round numbers that the files store. Files of plain numbers are not asked."""
    if is_gguf(model):
        return bool(read_config(folder_of(model))["dtype"] == "float32")
    scheme = _scheme_of(model, revision)
    return scheme is not None and not _is_within_bfloat16(scheme)


def _is_within_bfloat16(scheme: Mapping[str, Any]) -> bool:
    """Whether each number is one of a few bits times a power of two."""
    method = scheme.get("quant_method")
    if method == "quark":
        return all(each["dtype"] == "fp4" for each in quark_weights(scheme))
    return method in _WITHIN_BFLOAT16 or (method == "fp8" and scheme.get("scale_fmt") == "ue8m0")


def _scheme_of(model: str, revision: str | None) -> Mapping[str, Any] | None:
    path = optional_file(model, revision, "config.json")
    if path is None:
        return None
    config = read_config(path.parent)
    check_scheme(config, model)
    return scheme_of(config)
