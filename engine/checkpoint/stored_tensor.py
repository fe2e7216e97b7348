"""Tensors whose numbers stay as a file stores them until an operator reads them.

A `StoredTensor` stands in a model for a weight that is too large to hold in the number format it is computed in: it
can be cut, joined and stacked along its rows as it is, and any other operator gets its numbers. So a model is built,
fused and packed as one of dense weights is, and only one of its weights at a time is dense.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Codec", "StoredRows", "StoredTensor", "as_stored", "dense"]

_CPU = torch.device("cpu")
_NUMBERS_AT_ONCE = 1 << 15
"""Numbers that a thread expands at once: what lies between the stored and the dense ones stays in its caches, and torch
does not spread the work over threads itself, which on a busy machine wait for one another."""

_NUMBERS_OF_ALL_THREADS = 1 << 22
"""Numbers that a codec with threads of its own expands at once."""


class Codec(Protocol):
    """How rows are stored. Codecs are compared: rows of equal ones can be joined."""

    @property
    def is_threaded(self) -> bool:
        """Whether `decode` spreads its work over threads itself."""
        ...

    def decode(self, *parts: Tensor) -> Tensor:
        """Returns the numbers [R, K], in float32 or as they are stored; each of the parts has R rows."""
        ...


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of one matrix, stored alike."""

    codec: Codec
    parts: tuple[Tensor, ...]  # [R, ...] each

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, rows: slice | Tensor) -> "StoredRows":
        return replace(self, parts=tuple(part[rows] for part in self.parts))

    def decode_into(self, out: Tensor) -> None:
        """Writes the numbers into out [R, K], which may round them."""
        is_threaded = self.codec.is_threaded
        step = max(1, (_NUMBERS_OF_ALL_THREADS if is_threaded else _NUMBERS_AT_ONCE) // out.shape[1])

        def decode(start: int) -> None:
            rows = slice(start, start + step)
            out[rows] = self.codec.decode(*(part[rows] for part in self.parts))

        with ThreadPoolExecutor(1 if is_threaded else torch.get_num_threads()) as pool:
            for _ in pool.map(decode, range(0, len(self), step)):
                pass


class StoredTensor(Tensor):
    """A tensor [..., K] of stored rows, or the transposed of the last two sizes of one. It takes no memory of its own.

    Its dtype and device are those of its numbers when they are read; rows lie on the CPU.
    """

    pieces: tuple[StoredRows, ...]
    rows_shape: tuple[int, ...]
    """The shape [..., K] of what is stored; `shape` differs if `is_transposed`."""
    is_transposed: bool

    @staticmethod
    def __new__(
        cls,
        pieces: Sequence[StoredRows],
        shape: Sequence[int],
        dtype: torch.dtype,
        is_transposed: bool = False,
        device: torch.device = _CPU,
    ) -> "StoredTensor":
        sizes = [*shape[:-2], shape[-1], shape[-2]] if is_transposed else [*shape]
        made: StoredTensor = Tensor._make_wrapper_subclass(cls, sizes, dtype=dtype, device=device)
        made.pieces, made.rows_shape, made.is_transposed = tuple(pieces), tuple(shape), is_transposed
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @property
    def parts(self) -> Iterator[Tensor]:
        """Yields the tensors that the content consists of."""
        return (part for piece in self.pieces for part in piece.parts)

    def expanded(self) -> Tensor:
        """Returns the dense tensor, on its device."""
        columns = self.rows_shape[-1]
        out = torch.empty(math.prod(self.rows_shape[:-1]), columns, dtype=self.dtype)
        start = 0
        for rows in _joined(self.pieces):
            rows.decode_into(out[start : start + len(rows)])
            start += len(rows)
        whole = out.to(self.device).view(self.rows_shape)
        return whole.transpose(-1, -2) if self.is_transposed else whole

    def part(self, start: int, stop: int) -> "StoredTensor":
        """Returns [start:stop] along the first dimension. A transposed matrix must have one before its two."""
        rows_each = math.prod(self.rows_shape[1:-1])
        pieces = _cut(self.pieces, start * rows_each, stop * rows_each)
        return self._of([*pieces], (stop - start, *self.rows_shape[1:]))

    def with_shape(self, shape: Sequence[int]) -> "StoredTensor":
        """Returns the same rows with other sizes before the last."""
        return self._of(self.pieces, shape)

    def on(self, device: torch.device) -> "StoredTensor":
        """Returns the same rows with another device."""
        return StoredTensor(self.pieces, self.rows_shape, self.dtype, self.is_transposed, device)

    def _of(self, pieces: Sequence[StoredRows], shape: Sequence[int]) -> "StoredTensor":
        return StoredTensor(pieces, shape, self.dtype, self.is_transposed, self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor(shape={[*self.shape]}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has it as a plain function
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch.inference_mode(False):  # a view of a tensor from outside that mode may not be from inside
            structural = _STRUCTURAL.get(func.overloadpacket)
            result = structural(*args, **(kwargs or {})) if structural else NotImplemented
            if result is not NotImplemented:
                return result
            return func(*_expand(args), **{name: dense(value) for name, value in (kwargs or {}).items()})


def dense(value: Any) -> Any:
    """Returns a stored tensor's numbers, and anything else as it is."""
    return value.expanded() if isinstance(value, StoredTensor) else value


def _expand(values: Sequence[Any]) -> list[Any]:
    return [_expand(value) if isinstance(value, list | tuple) else dense(value) for value in values]


def _joined(pieces: Sequence[StoredRows]) -> Iterator[StoredRows]:
    """Yields the pieces, neighbours of equal codecs as one."""
    for codec, group in groupby(pieces, key=lambda piece: piece.codec):
        parts = [piece.parts for piece in group]
        yield StoredRows(codec, parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True))))


def _cut(pieces: Sequence[StoredRows], start: int, stop: int) -> Iterator[StoredRows]:
    """Yields rows [start, stop) of all."""
    at = 0
    for piece in pieces:
        first, last = max(start - at, 0), min(stop - at, len(piece))
        if first < last:
            yield piece if last - first == len(piece) else piece[first:last]
        at += len(piece)


def _same(tensor: StoredTensor, *_: Any, **__: Any) -> StoredTensor:
    return tensor.with_shape(tensor.rows_shape)


def _to_copy(tensor: StoredTensor, dtype: torch.dtype | None = None, **options: Any) -> Any:
    device = options.get("device")
    if device is not None and torch.device(device).type != tensor.device.type:
        return NotImplemented
    return StoredTensor(tensor.pieces, tensor.rows_shape, dtype or tensor.dtype, tensor.is_transposed, tensor.device)


def _transpose(tensor: StoredTensor, first: int, second: int) -> Any:
    last_two = {tensor.dim() - 1, tensor.dim() - 2}
    if {first % tensor.dim(), second % tensor.dim()} != last_two:
        return NotImplemented
    return StoredTensor(tensor.pieces, tensor.rows_shape, tensor.dtype, not tensor.is_transposed, tensor.device)


def _has_rows_first(tensor: Any) -> bool:
    """Whether the tensor can be cut along its first dimension as it is stored."""
    return isinstance(tensor, StoredTensor) and tensor.dim() - tensor.is_transposed >= 2


def _slice(tensor: StoredTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if dim % tensor.dim() or step != 1 or not _has_rows_first(tensor):
        return NotImplemented
    first, last, _ = slice(start, end).indices(len(tensor))
    return tensor.part(first, max(first, last))


def _split(tensor: StoredTensor, size: int | Sequence[int], dim: int = 0) -> Any:
    if dim % tensor.dim() or not _has_rows_first(tensor):
        return NotImplemented
    total = len(tensor)
    sizes = size if not isinstance(size, int) else [min(size, total - at) for at in range(0, total, size)]
    return [tensor.part(end - each, end) for each, end in zip(sizes, accumulate(sizes), strict=True)]


def _select(tensor: StoredTensor, dim: int, index: int) -> Any:
    if dim % tensor.dim() or tensor.dim() < 3:
        return NotImplemented
    one = tensor.part(index % len(tensor), index % len(tensor) + 1)
    return one.with_shape(one.rows_shape[1:])


def _unbind(tensor: StoredTensor, dim: int = 0) -> Any:
    if dim % tensor.dim() or tensor.dim() < 3:
        return NotImplemented
    return [_select(tensor, 0, index) for index in range(len(tensor))]


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    if dim != 0 or not _are_alike(tensors) or len({tensor.shape for tensor in tensors}) > 1:
        return NotImplemented
    first = tensors[0]
    return first._of(_pieces(tensors), (len(tensors), *first.rows_shape))


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Joins along the first dimension, or matrices of stacks along their rows."""
    if not _are_alike(tensors) or len({tensor.shape[-1] for tensor in tensors}) > 1:
        return NotImplemented
    first = tensors[0]
    if dim % first.dim() == 0 and _has_rows_first(first):
        length = sum(map(len, tensors))
        return first._of(_pieces(tensors), (length, *first.rows_shape[1:]))
    if dim % first.dim() == 1 and first.dim() == 3 and not first.is_transposed:
        matrices = [_cat(each) for each in zip(*map(_unbind, tensors), strict=True)]
        return _stack(matrices)
    return NotImplemented


def _are_alike(tensors: Sequence[Any]) -> bool:
    return (
        all(isinstance(tensor, StoredTensor) for tensor in tensors)
        and len({(tensor.dtype, tensor.device, tensor.dim(), tensor.is_transposed) for tensor in tensors}) == 1
    )


def _pieces(tensors: Sequence[StoredTensor]) -> list[StoredRows]:
    return [*chain.from_iterable(tensor.pieces for tensor in tensors)]


def _embedding(weight: Any, numbers: Tensor, *_: Any, **__: Any) -> Any:
    """Expands the rows of these numbers only."""
    is_stored = isinstance(weight, StoredTensor) and weight.device == numbers.device == _CPU
    if not is_stored or weight.is_transposed or len(weight.pieces) != 1:
        return NotImplemented
    out = torch.empty(numbers.numel(), weight.shape[-1], dtype=weight.dtype)
    weight.pieces[0][numbers.flatten()].decode_into(out)
    return out.view(*numbers.shape, weight.shape[-1])


def _grouped_mm(rows: Any, weights: Any, ends: Tensor | None = None, *rest: Any, **options: Any) -> Any:
    """Multiplies groups of rows, each by the weight of its expert, and expands the weights of groups with rows only."""
    if not isinstance(weights, StoredTensor) or weights.dim() != 3 or ends is None or isinstance(rows, StoredTensor):
        return NotImplemented
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    chosen = (ends > starts).nonzero().flatten()
    if not len(chosen):
        return NotImplemented
    some = torch.stack([_select(weights, 0, index).expanded() for index in chosen.tolist()])
    return _aten._grouped_mm(rows, some, ends[chosen], *rest, **options)


def _new_zeros(tensor: StoredTensor, size: Sequence[int], **options: Any) -> Tensor:
    options |= {name: options.get(name) or getattr(tensor, name) for name in ("dtype", "device")}
    return torch.zeros(size, **options)


_aten = torch.ops.aten
_STRUCTURAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.detach, _aten.alias), _same),
    _aten._to_copy: _to_copy,
    _aten.transpose: _transpose,
    _aten.t: lambda tensor: _transpose(tensor, 0, 1),
    _aten.slice: _slice,
    **dict.fromkeys((_aten.split, _aten.split_with_sizes), _split),
    _aten.select: _select,
    _aten.unbind: _unbind,
    _aten.stack: _stack,
    _aten.cat: _cat,
    _aten.embedding: _embedding,
    _aten._grouped_mm: _grouped_mm,
    _aten.new_zeros: _new_zeros,
}
"""Operator -> the form of it that leaves numbers as they are stored; NotImplemented where it would not."""


class _Plain:
    """The codec of rows that are stored as they are."""

    is_threaded = False

    def decode(self, *parts: Tensor) -> Tensor:
        return parts[0]


_PLAIN = _Plain()


def as_stored(tensor: Tensor) -> StoredTensor:
    """Returns a stored tensor of the rows of a dense one [..., K], whose memory they keep; a stored one as it is."""
    if isinstance(tensor, StoredTensor):
        return tensor
    return StoredTensor([StoredRows(_PLAIN, (tensor.flatten(0, -2),))], tensor.shape, tensor.dtype)
