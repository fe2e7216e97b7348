"""Whether a checkpoint directory has its weights, as far as can be seen without reading them; torch-free."""

from pathlib import Path

import msgspec

from engine.checkpoint.local import folder_of, is_gguf, is_local
from engine.core.errors import ModelError

__all__ = ["check_weights"]

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_POINTER = b"version https://git-lfs"
"""How the file begins that Git leaves where it did not fetch a large one."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_weights(model: str) -> None:
    """Raises ModelError for a directory without weights, without some of those that its index names, or with Git LFS's
    pointers instead. GGUF files pass, whose header tells, and hub ids."""
    if not is_local(model) or is_gguf(model):
        return
    folder = folder_of(model)
    files = sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)})
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


def _named_by_index(folder: Path) -> set[str]:
    """Returns the names of the files with weights; none where there is no index, or one that loading will refuse."""
    for name in _INDICES:
        try:
            content = (folder / name).read_bytes()
            return {*msgspec.json.decode(content, type=_Index).weight_map.values()}
        except (OSError, msgspec.MsgspecError):
            continue
    return set()


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False  # loading says why
