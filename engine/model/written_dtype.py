"""The number format that config.json names, in whatever spelling."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from engine.checkpoint.hub import optional_file
from engine.checkpoint.local import read_config
from engine.core.errors import ModelError

_SPELLINGS = {
    "auto": torch.bfloat16,  # the weights' own: where that matters, bfloat16 is what it nearly always is
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_KEYS = ("dtype", "torch_dtype")


def dtype_override(model: str, revision: str | None) -> dict[str, torch.dtype]:
    """Returns the argument by which transformers takes the number format from here, if config.json spells it in a way
    that it does not know. Raises ModelError for one that nobody knows."""
    path = optional_file(model, revision, "config.json")
    config = {} if path is None else read_config(path.parent)
    for part, fields in config.items():
        if isinstance(fields, Mapping) and part.endswith("_config"):
            _check_part(part, fields)
    key = next((key for key in _KEYS if config.get(key) is not None), None)
    if key is None or _is_plain(config[key]):
        return {}
    return {"dtype": _dtype_of(config[key], key)}


def _check_part(part: str, fields: Mapping[str, Any]) -> None:
    """Raises ModelError for a spelling that transformers does not know in a part, where none can be given instead."""
    for key in _KEYS:
        value = fields.get(key)
        if value is not None and not _is_plain(value):
            cure = str(_dtype_of(value, f"{part}.{key}")).removeprefix("torch.")
            raise ModelError(f"config.json: {part}.{key} is {value!r}: write it as {cure!r}.")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and _is_format(getattr(torch, value, None))


def _dtype_of(value: Any, place: str) -> torch.dtype:
    name = value.removeprefix("torch.").lower() if isinstance(value, str) else ""
    dtype = _SPELLINGS.get(name, getattr(torch, name, None))
    if _is_format(dtype):
        return dtype
    raise ModelError(
        f"config.json: {place} is {str(value)[:64]!r}, which is no number format of weights: "
        "write float32, bfloat16 or float16."
    )


def _is_format(value: Any) -> TypeGuard[torch.dtype]:
    return isinstance(value, torch.dtype) and value.is_floating_point
