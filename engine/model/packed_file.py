"""A loaded model in one file: what the kernels run as a whole, packed as they read it, and all that is known of it.

It is a safetensors file: tensors by their number, and one more, `facts`, with the rest in MessagePack. Its metadata has
a digest of all of them.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import torch
from torch import Tensor

from engine.attention.kv_cache import LayerShape
from engine.core.machine import ModelSize
from engine.host.huge_pages import HUGE_PAGE, empty_in_huge_pages
from engine.host.mapped_file import MappedFile
from engine.model.content_digest import add_content
from engine.model.decoder_parts import DecoderParts
from engine.model.drafting.kernel_head import HeadParts, KernelMtpInput
from engine.runner.loaded_model import DraftModel, LoadedModel

__all__ = ["DamagedFileError", "read_packed", "write_packed"]

_NOT_KEPT, _OF_PARTS = ("module", "draft"), ("parts", "head")
_DTYPES = {torch.uint8: "U8", torch.int8: "I8", torch.bfloat16: "BF16", torch.float32: "F32"}
"""Types of tensors that there are in a decoder's parts, by their names in the format."""
_ALIGNMENT = 64  # of tensors in memory


class _HeadFacts(msgspec.Struct):
    """Everything that is known of its MTP head."""

    parts: HeadParts
    size: ModelSize
    layers: tuple[LayerShape, ...]


_Facts = msgspec.defstruct(
    "_Facts",
    [
        ("parts", DecoderParts),
        ("head", _HeadFacts | None),
        *((f.name, f.type) for f in fields(LoadedModel) if f.name not in _NOT_KEPT),
    ],
)
"""Everything that is known of a loaded model, with the parts of its decoder in place of its module."""


class DamagedFileError(Exception):
    """A file is not what `write_packed` wrote."""


def write_packed(path: Path, model: LoadedModel, parts: DecoderParts, head: HeadParts | None = None) -> None:
    """Writes a model, whose decoder has these parts, to a file and to the disk; of drafts, an MTP head of these parts.
    Raises OSError."""
    tensors: list[Tensor] = []
    numbers: dict[object, int] = {}  # of tensors by where they are: an embedding in blocks may be the head, too

    def encode(value: object) -> object:
        if isinstance(value, Tensor):
            place = value.data_ptr(), value.dtype, value.shape, value.stride()
            number = numbers.setdefault(place, len(tensors))
            if number == len(tensors):
                tensors.append(value)
            return number
        return str(value).removeprefix("torch.")  # a dtype or a device

    known = {name: getattr(model, name) for name in _Facts.__struct_fields__ if name not in _OF_PARTS}
    draft = None if head is None or model.draft is None else _HeadFacts(head, model.draft.size, model.draft.layers)
    facts = msgspec.msgpack.encode(_Facts(parts=parts, head=draft, **known), enc_hook=encode)
    numbered = sorted(enumerate(tensors), key=lambda each: each[1].nbytes % _ALIGNMENT != 0)  # those after it are not
    content = {str(index): tensor.contiguous() for index, tensor in numbered}
    content["facts"] = torch.frombuffer(bytearray(facts), dtype=torch.uint8)
    with path.open("wb") as file:
        _write_safetensors(file, content, {"digest": _digest(content)})
        file.flush()
        os.fsync(file.fileno())


def _write_safetensors(file: BinaryIO, content: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors one by one; the library's own function makes a copy of all of them first."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in content.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-(8 + len(encoded)) % _ALIGNMENT)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for tensor in content.values():
        file.write(tensor.flatten().view(torch.uint8).numpy().data)


def read_packed(path: Path, is_paged: bool = False) -> LoadedModel:
    """Reads a model that `write_packed` wrote. One that is paged stays in its file: before anybody changes that, this
    process ends. Raises OSError or DamagedFileError."""
    try:
        mapped, digest = _mapped(path, is_paged)
        content = {name: _aligned(each) if is_paged else _own_memory(each) for name, each in mapped.items()}
    except OSError:
        raise
    except Exception as error:  # there are others where the header is odd
        raise DamagedFileError(str(error)) from error
    if "facts" not in content or _digest(content) != digest:
        raise DamagedFileError("its content is not what was written")
    return _model_of(content)


def _model_of(content: Mapping[str, Tensor]) -> LoadedModel:
    def decode(kind: type, value: Any) -> object:
        if kind is Tensor:
            return content[str(value)]
        return torch.device(value) if kind is torch.device else getattr(torch, value)

    facts: Any = msgspec.msgpack.decode(content["facts"].numpy().tobytes(), type=_Facts, dec_hook=decode)
    known = {name: getattr(facts, name) for name in _Facts.__struct_fields__ if name not in _OF_PARTS}
    head: _HeadFacts | None = facts.head
    draft = DraftModel(head.parts, head.size, head.layers, KernelMtpInput(head.parts.join)) if head else None
    return LoadedModel(module=cast(DecoderParts, facts.parts), draft=draft, **known)


def _mapped(path: Path, is_leased: bool) -> tuple[dict[str, Tensor], str | None]:
    """Returns the tensors of a file, which lie in it, and the digest that it has of them."""
    file = MappedFile(path, is_leased)
    start = 8 + int.from_bytes(file.bytes_of(0, 8), "little")
    header = msgspec.json.decode(file.bytes_of(8, start))
    digest = header.pop("__metadata__", {}).get("digest")
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    return {
        name: file.tensor(start + each["data_offsets"][0], each["shape"], dtypes[each["dtype"]])
        for name, each in header.items()
    }, digest


def _aligned(tensor: Tensor) -> Tensor:
    """Returns a tensor of a mapped file, or a copy where it begins at an odd place."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else _own_memory(tensor)


def _own_memory(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor of a mapped file, in huge pages where it is large, as packed weights are."""
    if tensor.nbytes < HUGE_PAGE:
        return tensor.clone()
    return empty_in_huge_pages(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def _digest(content: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(content):
        digest.update(repr((name, content[name].dtype, tuple(content[name].shape))).encode())
        add_content(digest, content[name])
    return digest.hexdigest()
