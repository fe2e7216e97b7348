"""Sampling defaults by the model's authors: `generation_config.json` beside the weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.hub import optional_file
from engine.core.errors import InvalidParameterError, ModelError
from engine.core.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"
_WORDS: Mapping[type, str] = {float: "a number", int: "a whole number", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling parameters for requests that leave them out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_KINDS: Mapping[str, type] = {**dict.fromkeys(_NUMBERS, float), "top_k": int, "do_sample": bool}
"""What is read of the file, and of which kind it must be."""


def load_generation_defaults(source: str, model: str, revision: str | None) -> GenerationDefaults:
    """Loads the defaults. `source` is --generation-config: auto (the model's own), none, or a directory. Raises
    ModelError."""
    if source == "none":
        return GenerationDefaults()
    path = optional_file(model, revision, FILE_NAME) if source == "auto" else _given(source)
    return GenerationDefaults() if path is None else _read(path)


def _given(directory: str) -> Path:
    path = Path(directory).expanduser() / FILE_NAME
    if not path.is_file():
        raise ModelError(f"--generation-config: there is no {path}; give auto, none or a directory that has one.")
    return path


def _read(path: Path) -> GenerationDefaults:
    hint = "mend it, or start with --generation-config none"
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        known = {name: values[name] for name in _KINDS if values.get(name) is not None}
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}; {hint}.") from error
    for name, value in known.items():
        if not _is_of(value, _KINDS[name]):
            raise ModelError(f"{path}: {name} must be {_WORDS[_KINDS[name]]}, not {str(value)[:64]!r}; {hint}.")
    if "top_k" in known:
        known["top_k"] = int(known["top_k"])
    is_greedy = known.pop("do_sample", None) is False
    if known.get("top_k") == -1:
        known["top_k"] = 0
    if is_greedy:
        known["temperature"] = 0.0  # whatever else the file says
    try:
        SamplingParams(**known)
    except InvalidParameterError as error:
        raise ModelError(f"{path} has a value that cannot be used: {error} Please {hint}.") from error
    return GenerationDefaults(**known)


def _is_of(value: Any, kind: type) -> bool:
    """Whether a value of JSON is of this kind. Whole numbers may have a fraction of zero, and truth values are no
    numbers."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int | float) and (kind is float or value == int(value))
