"""Where a model comes from: a directory on this machine or a hub id, and what its config.json may say; torch-free."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import ModelError, UnsupportedModelError

_WEIGHT_FILES = ("*.safetensors", "*.bin")
_SAFETENSORS = "serve the checkpoint that it was made from, with config.json and safetensors files."


def is_local(model: str) -> bool:
    """Whether `model` means a directory: it exists, or is written as a path is."""
    return model.startswith((".", "/", "~")) or Path(model).exists()


def check_checkpoint(model: str) -> None:
    """Raise ModelError for a directory that holds no checkpoint that can be served, as far as can be told without
    transformers. Hub ids pass: only asking the hub can tell."""
    if not is_local(model):
        return
    path = Path(model)
    if path.suffix == ".gguf":
        raise UnsupportedModelError(f"{model} is a GGUF file; {_SAFETENSORS}")
    if not path.is_dir():
        why = "it is a file" if path.exists() else "there is no such directory"
        raise ModelError(f"{model} is not a checkpoint directory: {why}.")
    if not (path / "config.json").is_file():
        raise _without_config(path)
    check_unquantized(read_config(path), model)


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says. Raises ModelError."""
    path = folder / "config.json"
    try:
        config = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is damaged: it holds no JSON object.")
    return config


def state_of(folder: Path) -> str:
    """Another one once config.json or weights were replaced. Of the weights, which are not read for this, it knows
    names, sizes and times of modification. Raises ModelError."""
    files = sorted(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern))
    facts = [_content(folder / "config.json"), *((path.name, _size_and_time(path)) for path in files)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()  # a name may hold what is no text: repr escapes it


def check_model_type(config: Mapping[str, Any], model: str, trust_remote_code: bool) -> None:
    """Raise UnsupportedModelError for a model type that transformers does not know, which is imported here."""
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = config.get("model_type", "")  # without it transformers looks at the model's name
    if kind == "" or str(kind) in CONFIG_MAPPING_NAMES or (trust_remote_code and "auto_map" in config):
        return
    cure = "a newer transformers may know it"
    if "auto_map" in config:
        cure = "--trust-remote-code runs the code that the checkpoint brings for it"
    raise UnsupportedModelError(
        f"config.json of {model}: model_type {str(kind)[:64]!r} is not known to transformers {__version__}; {cure}."
    )


def check_unquantized(config: Mapping[str, Any], model: str) -> None:
    """Raise UnsupportedModelError for weights that are quantized in the files."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("dequantize"):
        return
    method = str(quantization.get("quant_method", "bitsandbytes"))[:64]
    raise UnsupportedModelError(
        f"The weights of {model} are quantized ({method}), which cannot be served: take the checkpoint that is not, "
        "with --quantization int4 or int8 if its weights shall be small."
    )


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error


def _size_and_time(path: Path) -> tuple[int, int] | None:
    """None of a link that leads nowhere."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _without_config(path: Path) -> ModelError:
    if (path / "adapter_config.json").is_file():
        return UnsupportedModelError(
            f"{path} is an adapter (LoRA), not a model: merge it into the model that it was made for, and serve that."
        )
    if any(path.glob("*.gguf")):
        return UnsupportedModelError(f"{path} has GGUF files only; {_SAFETENSORS}")
    return ModelError(f"{path} is not a checkpoint directory: it has no config.json.")
