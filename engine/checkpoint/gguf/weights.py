"""The weights of a GGUF file by the names of the model's parameters, as they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.gguf.architectures import Place, places_of
from engine.checkpoint.gguf.blocks import BlockCodec, Expander
from engine.checkpoint.gguf.header import GgufFile, TensorInfo
from engine.checkpoint.stored_tensor import Codec, StoredRows, StoredTensor
from engine.core.errors import ModelError

__all__ = ["gguf_weights"]


def gguf_weights(file: GgufFile, dtype: torch.dtype, expander: Expander | None) -> dict[str, Tensor]:
    """Returns parameter -> weight, whose numbers are read in `dtype`, those of blocks by `expander` if there is one.
    Vectors are dense. The files are mapped as long as there is any of the others. Raises ModelError."""
    mapped = {path: _mapped(path) for path in {tensor.path for tensor in file.tensors.values()}}
    source = _Source(file, mapped, dtype, expander)
    return {place.name: _weight(source, place) for place in places_of(file)}


@dataclass(frozen=True, slots=True)
class _Source:
    """Where weights are read from, and how."""

    file: GgufFile
    mapped: Mapping[Path, Tensor]
    """The bytes of each of its files."""
    dtype: torch.dtype
    expander: Expander | None


def _mapped(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _bytes_of(tensor: TensorInfo, file: Tensor) -> Tensor:
    """Returns the tensor's rows [R, bytes]."""
    rows = file[tensor.offset : tensor.offset + tensor.nbytes].view(tensor.num_rows, tensor.row_bytes)
    # Numbers of 32 and 16 bits are read as such, which takes addresses that are multiples of their size.
    return rows.clone() if tensor.offset % 4 and tensor.kind.num_numbers == 1 else rows


def _weight(source: _Source, place: Place) -> Tensor:
    tensors = [_stored(source, place, name) for name in place.sources]
    if len(tensors) > 1 and len({tensor.shape for tensor in tensors}) > 1:
        raise ModelError(f"{source.file.path}: the tensors {' and '.join(place.sources)} differ in shape.")
    whole: Tensor = torch.cat(tensors, dim=1) if len(tensors) > 1 else tensors[0]
    return whole


def _stored(source: _Source, place: Place, name: str) -> Tensor:
    file, dtype = source.file, source.dtype
    if name not in file.tensors:
        raise ModelError(f"{file.path} is incomplete: it has no tensor {name}.")
    tensor = file.tensors[name]
    codec: Codec = BlockCodec(tensor.kind, source.expander)
    if place.offset:
        codec = _WithOffset(codec, place.offset)
    rows = StoredRows(codec, (_bytes_of(tensor, source.mapped[tensor.path]),))
    shape = (1, *tensor.shape) if place.is_column and len(tensor.shape) == 1 else tensor.shape
    if place.num_rotated_heads and len(shape) == 1:
        vector = codec.decode(*rows.parts).flatten()
        return vector[_row_order(file, name, len(vector), place.num_rotated_heads)].to(dtype)
    if len(shape) == 1:
        return codec.decode(*rows.parts).flatten().to(dtype)
    if place.num_rotated_heads:
        rows = rows[_row_order(file, name, len(rows), place.num_rotated_heads)]
    return StoredTensor([rows], shape, dtype)


def _row_order(file: GgufFile, name: str, num_rows: int, num_heads: int) -> Tensor:
    """Returns which stored row each row of the model's weight is: of each head the first ones of all pairs, then the
    second ones."""
    if num_rows % (2 * num_heads):
        raise ModelError(f"{file.path}: the {num_rows} rows of {name} are not those of {num_heads} heads.")
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


@dataclass(frozen=True, slots=True)
class _WithOffset:
    """A codec of numbers to each of which the same is added."""

    codec: Codec
    offset: float

    @property
    def is_threaded(self) -> bool:
        return self.codec.is_threaded

    def decode(self, *parts: Tensor) -> Tensor:
        return self.codec.decode(*parts) + self.offset
