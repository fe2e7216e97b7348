"""Sampling defaults by the model's authors: `generation_config.json` beside the weights."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.hub import optional_file
from engine.core.errors import InvalidParameterError, ModelError
from engine.core.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling parameters for requests that leave them out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


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
        known = {field.name: values[field.name] for field in fields(GenerationDefaults) if _is_set(values, field.name)}
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is damaged: {error}; {hint}.") from error
    if known.get("top_k") == -1:
        known["top_k"] = 0
    if values.get("do_sample") is False:
        known["temperature"] = 0.0  # greedy, whatever else the file says
    try:
        SamplingParams(**known)
    except (InvalidParameterError, TypeError) as error:
        raise ModelError(f"{path} has a value that cannot be used: {error} Please {hint}.") from error
    return GenerationDefaults(**known)


def _is_set(values: dict[str, Any], name: str) -> bool:
    return values.get(name) is not None
