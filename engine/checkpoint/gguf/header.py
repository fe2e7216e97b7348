"""Reads the header of a GGUF file: its metadata, and where its tensors are; torch-free.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A header is hostile: whatever it says, reading it
takes no more memory than a few times the bytes that it has, and ends with what was read or with a ModelError.
"""

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from engine.checkpoint.gguf.block_types import BLOCK_TYPES, OTHER_TYPES, BlockType
from engine.core.errors import ModelError, UnsupportedModelError

__all__ = ["GgufFile", "TensorInfo", "read_gguf"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its form, as `struct` and numpy spell it."""
_STRING, _ARRAY = 8, 9
_MAX_STRINGS = 1 << 21  # of an array: vocabularies have up to 300,000 tokens, and as many merges
_MAX_DIMENSIONS = 4
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is, and what it is made of."""

    shape: tuple[int, ...]
    """Sizes, rows before columns, as torch has them: the reverse of the file's order."""
    kind: BlockType
    path: Path
    offset: int
    """Position of the first byte in the file at `path`."""

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.kind.num_numbers * self.kind.num_bytes

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The content of the headers of one model, which may be split into several files."""

    path: Path
    metadata: Mapping[str, Any]
    """Key -> number, truth value, text, list of texts, or numpy array."""
    tensors: Mapping[str, TensorInfo]
    digest: str
    """Hash of all headers' bytes, in hexadecimal digits."""


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file, and those of the other parts of a split one. Raises ModelError."""
    first = _read_part(path)
    num_parts = _split_number(first, "split.count", 1)
    if num_parts < 2:
        return first
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != num_parts:
        raise ModelError(f"{path} is one of {num_parts} files of a model: give it the name that it was made with.")
    if int(match[2]) != 1 or _split_number(first, "split.no", 0) != 0:
        raise ModelError(
            f"{path} is a later part of a model of {num_parts} files: name the first one, {match[1]}-00001."
        )
    parts = [first]
    for number in range(2, num_parts + 1):
        parts.append(_read_part(path.with_name(f"{match[1]}-{number:05}-of-{num_parts:05}.gguf")))
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    if len(tensors) != sum(len(part.tensors) for part in parts):
        raise ModelError(f"The parts of {path} do not belong together: they have tensors of the same name.")
    if len(tensors) != _split_number(first, "split.tensors.count", len(tensors)):
        raise ModelError(f"The parts of {path} do not belong together: they have {len(tensors)} tensors.")
    digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    return GgufFile(path, first.metadata, tensors, digest)


def _split_number(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or not 0 <= value < 1 << 31 or (key == "split.count" and value > 99999):
        raise ModelError(f"{file.path} is a damaged GGUF file: {key} is {str(value)[:64]}.")
    return value


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).read()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped, which is a ValueError
        reason = getattr(error, "strerror", None) or "it is empty"
        raise ModelError(f"{path} cannot be read: {reason}.") from error


class _Reader:
    """Reads one file from its beginning."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at = path, content, 0

    def read(self) -> GgufFile:
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file: it does not begin with GGUF.")
        version = self._number("I")
        if version not in (2, 3):
            known = "it is big-endian" if version in (2 << 24, 3 << 24) else f"its version is {version}"
            raise UnsupportedModelError(
                f"{self._path} cannot be served: {known}; make it again with a newer llama.cpp."
            )
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                self._fail(f"it has {key[:64]!r} twice")
            metadata[key] = self._value()
        found = [self._tensor_entry() for _ in range(num_tensors)]
        digest = hashlib.sha256(self._content[: self._at]).hexdigest()
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            self._fail(f"general.alignment is {str(alignment)[:64]}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + at) for name, shape, kind, at in found}
        if len(tensors) != num_tensors:
            self._fail("two tensors have one name")
        return GgufFile(self._path, metadata, tensors, digest)

    def _fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self._path} is a damaged GGUF file: {reason}.")

    def _take(self, count: int) -> bytes:
        if count > len(self._content) - self._at:
            self._fail("it ends within its header")
        self._at += count
        return self._content[self._at - count : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _string(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError:
            self._fail("a text in its header is not UTF-8")

    def _value(self) -> Any:
        kind = self._number("I")
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        return self._number(self._form(kind))

    def _form(self, kind: int) -> str:
        if kind not in _NUMBERS:
            self._fail(f"a value in its header has the unknown type {kind}")
        return _NUMBERS[kind]

    def _array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            if count > _MAX_STRINGS:
                self._fail(f"a list in its header has {count} texts")
            return [self._string() for _ in range(count)]
        form = np.dtype("<" + self._form(kind))
        return np.frombuffer(self._take(count * form.itemsize), form)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._fail(f"tensor {name[:64]!r} has {num_dimensions} dimensions")
        sizes = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions))
        return name, sizes[::-1], self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> TensorInfo:
        if number not in BLOCK_TYPES:
            kind = OTHER_TYPES.get(number, f"number {number}")
            raise UnsupportedModelError(
                f"{self._path} has tensors of the type {kind}, such as {name[:64]!r}, which cannot be served: take a "
                f"file of {', '.join(each.name for each in BLOCK_TYPES.values())}."
            )
        tensor = TensorInfo(shape, BLOCK_TYPES[number], self._path, offset)
        if min(shape) < 1 or shape[-1] % tensor.kind.num_numbers:
            self._fail(f"tensor {name[:64]!r} of {tensor.kind.name} has the shape {list(shape)}")
        if offset + tensor.nbytes > len(self._content):
            self._fail(f"it ends within the tensor {name[:64]!r}")
        return tensor
