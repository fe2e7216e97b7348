"""Whether a checkpoint directory has its weights, as far as can be seen without reading them; torch-free."""

from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from engine.checkpoint.config_numbers import num_layers
from engine.checkpoint.local import folder_of, is_gguf, is_local, read_config
from engine.core.errors import ModelError

__all__ = ["bytes_of_weights", "check_weights"]

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_POINTER = b"version https://git-lfs"
"""How the file begins that Git leaves where it did not fetch a large one."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_weights(model: str) -> None:
    """Raises ModelError for a directory without weights, without some of those that its index names, with fewer tensors
    than layers, or with Git LFS's pointers instead. GGUF files pass, whose header tells, and hub ids."""
    if not is_local(model) or is_gguf(model):
        return
    folder = folder_of(model)
    files = _weight_files(folder)
    named = _named_by_index(folder)
    missing = sorted(name for name in named if not (folder / name).is_file())
    if missing and files:
        raise ModelError(
            f"{folder} is incomplete: {len(missing)} of {len(named)} files of weights are missing, "
            f"{missing[0]} for one; download it again."
        )
    if not files:
        raise ModelError(f"{folder} has no weights: there is no model.safetensors beside its config.json.")
    for path in files:
        if _is_pointer(path):
            raise ModelError(f"{path} is a pointer of Git LFS, not the weights: run git lfs pull in its directory.")
    if (folder / "config.json").is_file():
        _check_layers(model, read_config(folder), files)


def _check_layers(model: str, config: dict[str, Any], files: list[Path]) -> None:
    """Raises ModelError if config.json names more layers than the files have tensors: transformers would make them."""
    counts = [_num_tensors(path) for path in files]
    if None not in counts and num_layers(config) > (total := sum(filter(None, counts))):
        raise ModelError(
            f"The weights of {model} do not fit its config.json: it names {num_layers(config)} layers, and they have "
            f"{total} tensors."
        )


def _num_tensors(path: Path) -> int | None:
    """Returns how many tensors a safetensors file has; None for other files, and for damaged ones, which loading
    refuses."""
    try:
        with safe_open(path, framework="numpy") as file:
            return len(file.keys())
    except (OSError, SafetensorError):
        return None


def bytes_of_weights(model: str) -> int | None:
    """Returns the size of the files of weights in a directory; None for GGUF files and hub ids."""
    if not is_local(model) or is_gguf(model):
        return None
    return sum(path.stat().st_size for path in _weight_files(folder_of(model)))


def _weight_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)})


def _named_by_index(folder: Path) -> set[str]:
    """Returns the names of the files with weights; none where there is no index, or one that loading will refuse."""
    for name in _INDICES:
        try:
            content = (folder / name).read_bytes()
            return {*msgspec.json.decode(content, type=_Index).weight_map.values()}
        except (OSError, ValueError, RecursionError):
            continue
    return set()


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False  # loading says why
