"""Checkpoints on this machine, in a directory or a GGUF file, and which config.json can be served; torch-free."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.config_numbers import check_numbers
from engine.checkpoint.gguf.folder import gguf_folder
from engine.checkpoint.published.scheme import check_scheme, scheme_of
from engine.core.errors import ModelError, UnsupportedModelError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:\w+)?")


def is_local(model: str) -> bool:
    """Whether `model` means a directory or file: it exists, or is written as a path is."""
    return model.startswith((".", "/", "~")) or is_gguf(model) or Path(model).exists()


def is_gguf(model: str) -> bool:
    """Whether `model` means a GGUF file."""
    return model.endswith(".gguf")


def folder_of(model: str) -> Path:
    """Returns the directory of a local model's files; for a GGUF file, one of the files that its metadata stands for.
    Raises ModelError."""
    return gguf_folder(Path(model)) if is_gguf(model) else Path(model)


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether the content of config.json stands for a head that drafts for a model, and is none itself."""
    architectures = config.get("architectures")
    names = [str(name).lower() for name in architectures] if isinstance(architectures, list) else []
    is_marked = "draft_vocab_size" in config or bool(config.get("speculators_model_type"))
    return is_marked or any("eagle3" in name for name in names)


def check_checkpoint(model: str, is_draft: bool = False) -> None:
    """Raises ModelError for a directory without a checkpoint that can be served, or, if `is_draft`, draft for another,
    as far as can be seen without transformers. Hub ids pass: only the hub knows."""
    if not is_local(model):
        if not _HUB_ID.fullmatch(model):
            raise ModelError(
                f"{model!r} is neither a directory here nor a hub id, which looks like owner/name, or "
                "owner/name:Q4_K_M for a GGUF file."
            )
        return
    path = folder_of(model)
    if not path.is_dir():
        why = "it is a file" if path.exists() else "there is no such directory"
        raise ModelError(f"{model} is not a checkpoint directory: {why}.")
    if not (path / "config.json").is_file():
        raise _without_config(path)
    config = read_config(path)
    if is_head(config) and not is_draft:
        raise UnsupportedModelError(
            f"{model} is a head that drafts for a model, and no model: serve that, with --draft-model {model}."
        )
    check_scheme(config, model)
    check_numbers(config, model)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json, with the scheme that ModelOpt may have written beside it. Raises
    ModelError."""
    config = _object_in(folder / "config.json")
    beside = folder / "hf_quant_config.json"
    if scheme_of(config) is None and beside.is_file():
        scheme = _object_in(beside)
        inner = scheme.get("quantization")
        if isinstance(inner, dict) and inner.get("quant_algo") is not None:  # else only keys and values are quantized
            config["quantization_config"] = {**scheme, "quant_method": "modelopt"}
    return config


def _object_in(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is damaged: it holds no JSON object.")
    return content


def check_model_type(config: Mapping[str, Any], model: str, trust_remote_code: bool) -> None:
    """Raises UnsupportedModelError for a model type that transformers does not know. Imports transformers."""
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


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error


def _without_config(path: Path) -> ModelError:
    if (path / "adapter_config.json").is_file():
        return UnsupportedModelError(
            f"{path} is an adapter (LoRA), not a model: serve the model that it was made for, with --lora NAME={path}."
        )
    if any(path.glob("*.gguf")):
        return ModelError(f"{path} is a directory of GGUF files: name one of them.")
    return ModelError(f"{path} is not a checkpoint directory: it has no config.json.")
