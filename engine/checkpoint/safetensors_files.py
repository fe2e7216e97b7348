"""Tensors in the safetensors files of a checkpoint: one file, or several with an index of which has what."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from engine.core.errors import ModelError

__all__ = ["IsWanted", "open_all", "read_wanted", "tensor_names"]

IsWanted = Callable[[str], bool]
"""Whether the tensor of this name is wanted."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def open_all(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint. Files stay mapped as long as there are any of these. Raises ModelError."""
    index = folder / _INDEX
    files = {*_read_index(index).values()} if index.is_file() else {_SINGLE}
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        if not (folder / name).is_file():
            raise ModelError(f"The checkpoint {folder} is incomplete: there is no {name}.")
        tensors |= _read(folder / name, lambda _: True)
    return tensors


def read_wanted(find: Callable[[str], Path | None], is_wanted: IsWanted) -> dict[str, Tensor]:
    """Returns copies of the wanted tensors; `find` returns the path of a file of the checkpoint, None if it has no such
    file. Files without any of them are not asked for. Raises ModelError."""
    index = find(_INDEX)
    files = {file for name, file in _read_index(index).items() if is_wanted(name)} if index else {_SINGLE}
    paths = [path for name in sorted(files) if (path := find(name)) is not None]
    return {name: tensor.clone() for path in paths for name, tensor in _read(path, is_wanted).items()}


def tensor_names(find: Callable[[str], Path | None]) -> list[str]:
    """Returns the names of all tensors; `find` is as for `read_wanted`. Raises ModelError."""
    if (index := find(_INDEX)) is not None:
        return [*_read_index(index)]
    if (path := find(_SINGLE)) is None:
        return []
    with safe_open(path, framework="pt") as file:
        return [*file.keys()]


def _read_index(path: Path) -> Mapping[str, str]:
    """Returns the file of each tensor."""
    files: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    if any(not isinstance(name, str) or "/" in name for name in files.values()):
        raise ModelError(f"{path} is damaged: it names files elsewhere.")
    return files


def _read(path: Path, is_wanted: IsWanted) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if is_wanted(name)}  # noqa: SIM118  # no mapping
