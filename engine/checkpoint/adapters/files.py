"""The matrices of an adapter, read and checked: each pair has the rank that its settings say, and finite numbers."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from engine.checkpoint.adapters.settings import AdapterSettings, read_settings
from engine.core.errors import AdapterError, reason_of

__all__ = ["AdapterFiles", "Factors", "read_adapter", "size_of_files"]

_FILE = "adapter_model.safetensors"
_MAX_HEADER_BYTES = 16 << 20
_NAME = re.compile(r"base_model\.model\.(?P<module>[\w.]{1,300})\.lora_(?P<matrix>[AB])\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Factors(NamedTuple):
    """The matrices of one module, whose outputs get scale * up(down(x))."""

    down: Tensor  # [rank, K]
    up: Tensor  # [N, rank]
    scale: float


class AdapterFiles(NamedTuple):
    """The content of an adapter."""

    settings: AdapterSettings
    factors: dict[str, Factors]
    """By names of modules, as PEFT writes them."""
    digest: str
    """Hash of all that results depend on, 64 hexadecimal digits."""

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(len(each.down) for each in self.factors.values())


def read_adapter(path: str, max_rank: int, max_bytes: int) -> AdapterFiles:
    """Reads the adapter in a directory, whose file may have `max_bytes`. Raises AdapterError."""
    folder = Path(path)
    settings = read_settings(folder)
    pairs = _paired(folder, _read_tensors(folder, max_bytes))
    factors = {name: _checked(folder, name, pair, settings, max_rank) for name, pair in sorted(pairs.items())}
    if not factors:
        raise AdapterError(f"The adapter {folder} has no matrices.")
    return AdapterFiles(settings, factors, _digest(factors))


def size_of_files(path: str) -> int:
    """Returns the bytes of the file of an adapter's matrices, about what they take in memory; 0 if there is none."""
    file = Path(path) / _FILE
    return file.stat().st_size if file.is_file() else 0


def _read_tensors(folder: Path, max_bytes: int) -> dict[str, Tensor]:
    path = folder / _FILE
    if not path.is_file():
        other = next((name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).exists()), None)
        cure = f": {other} may run code when it is read; save the adapter as safetensors" if other else ""
        raise AdapterError(f"The adapter {folder} has no {_FILE}{cure}.")
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise AdapterError(f"{path} has {size:,} bytes, more than the {max_bytes:,} that may be read.")
        content = _read(path, size)  # not mapped: the process dies if a mapped file is truncated
        return dict(load(content))
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}.") from error
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise AdapterError(f"{path} is damaged: {reason_of(error)}.") from error


def _read(path: Path, size: int) -> bytes:
    """Returns the file's content, once its header is known to be no larger than those of adapters are."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise AdapterError(f"{path} is damaged: its header is said to have {num_bytes:,} bytes.")
        file.seek(0)
        return file.read(size)


def _paired(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors by module and matrix."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise AdapterError(
                f"The adapter {folder} has the tensor {name[:200]!r}, which is no matrix of a LoRA of linear layers."
            )
        pairs.setdefault(match["module"], {})[match["matrix"]] = tensor
    return pairs


def _checked(
    folder: Path, module: str, pair: Mapping[str, Tensor], settings: AdapterSettings, max_rank: int
) -> Factors:
    if pair.keys() != {"A", "B"}:
        raise AdapterError(f"The adapter {folder} is incomplete: {module} has one of two matrices.")
    down, up = pair["A"], pair["B"]
    rank = settings.rank_of(module)
    if rank > max_rank:
        raise AdapterError(
            f"The adapter {folder} has rank {rank}, and --max-lora-rank allows {max_rank}: give it more."
        )
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != rank or up.shape[1] != rank:
        raise AdapterError(
            f"The adapter {folder} is damaged: matrices {[*down.shape]} and {[*up.shape]} of {module} are not of rank "
            f"{rank}, as its settings say."
        )
    for tensor in (down, up):
        if tensor.dtype not in _DTYPES:
            raise AdapterError(
                f"The adapter {folder} has numbers of type {tensor.dtype} in {module}: none it can have."
            )
        if tensor.numel() and not tensor.isfinite().all():
            raise AdapterError(f"The adapter {folder} is damaged: a matrix of {module} has NaN or infinity.")
    return Factors(down, up, settings.scale_of(module))


def _digest(factors: Mapping[str, Factors]) -> str:
    digest = hashlib.sha256()
    for module, (down, up, scale) in factors.items():
        for tensor in (down, up):
            digest.update(repr((module, scale, tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
