"""The KV cache tensors of every layer, and their size in bytes."""

import copy
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.kv_format import num_numbers, row_size
from engine.attention.page_prefault import PagePrefault
from engine.host.huge_pages import PrivatePages
from engine.host.shared_pages import SharedPages


@dataclass(frozen=True, slots=True)
class VectorShape:
    """A vector that is kept of each token beside keys and values: the hidden state that an MTP head reads, or the index
    key of a layer that attends to chosen positions."""

    size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CompressedShape:
    """What a layer with compressed attention keeps beside its keys (`engine.attention.compressed`)."""

    ratio: int
    """How many tokens an entry stands for."""
    raw: VectorShape
    """What entries are made of, of each token."""
    index: VectorShape | None = None
    """The index key of each entry; None in a layer that attends to all entries."""

    def num_entries(self, block_size: int) -> int:
        """Returns how many entries a block has room for: so many end in it at most."""
        return -(-block_size // self.ratio)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of the key and the value that one attention layer caches per token."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    layer: int | None = None
    """The layer's number in the model; None if it is its place among the attention layers."""
    window: int | None = None
    """Positions that a token sees, its own included; None for all."""
    is_latent: bool = False
    """Whether values are the first numbers of keys, and stored as these alone."""
    index: VectorShape | None = None
    """The index key (`engine.attention.sparse`), whose type is the model's, in few bits or not; None without one."""
    compressed: CompressedShape | None = None
    """None if the layer has no entries that stand for several tokens."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns what a token takes in a cache of this type (`engine.attention.kv_format`), without entries."""
        of_index = self.index.bytes_per_token if self.index else 0
        of_raw = self.compressed.raw.bytes_per_token if self.compressed else 0
        return self.bytes_per_row(dtype) + of_index + of_raw

    def bytes_per_row(self, dtype: torch.dtype) -> int:
        """Returns what a key and a value take."""
        sizes = (self.head_size,) if self.is_latent else (self.head_size, self.head_size_v)
        return self.num_kv_heads * sum(row_size(size, dtype) for size in sizes) * dtype.itemsize

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Returns what a block of so many tokens takes, with its entries."""
        return block_size * self.bytes_per_token(dtype) + self._num_entries(block_size) * self._bytes_per_entry(dtype)

    def num_rows(self, block_size: int) -> int:
        """Returns how many keys a block has: those of its tokens, and behind them those of its entries."""
        return block_size + self._num_entries(block_size)

    def _num_entries(self, block_size: int) -> int:
        return self.compressed.num_entries(block_size) if self.compressed else 0

    def _bytes_per_entry(self, dtype: torch.dtype) -> int:
        index = self.compressed.index if self.compressed else None
        return self.bytes_per_row(dtype) + (index.bytes_per_token if index else 0)


class LayerCache(NamedTuple):
    """The paged keys and values of one layer, in rows as `engine.attention.kv_format` describes them."""

    keys: Tensor  # [num_blocks, num_kv_heads, block_size, row size of head_size]
    values: Tensor  # [num_blocks, num_kv_heads, block_size, row size of head_size_v]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def is_latent(self) -> bool:
        """Whether values are the first numbers of keys; then `values` is a view of these."""
        return self.values.data_ptr() == self.keys.data_ptr()

    @property
    def head_size_v(self) -> int:
        return num_numbers(self.values.shape[3], self.values.dtype)


class CompressedCache(NamedTuple):
    """What a layer with compressed attention keeps."""

    rows: LayerCache
    """Keys, which are the values too, in blocks of one each: of each block those of its tokens, then its entries."""
    raw: Tensor  # [num_blocks, block_size, raw size]
    index_keys: Tensor | None  # [num_blocks, entries of a block, index size]


class _EmptyBlocks(NamedTuple):
    """Makes tensors of so many blocks, whose numbers are not set."""

    pages: SharedPages | PrivatePages
    num_blocks: int
    block_size: int
    device: torch.device

    def layer_cache(self, shape: LayerShape, dtype: torch.dtype) -> LayerCache:
        key_size, value_size = (row_size(size, dtype) for size in (shape.head_size, shape.head_size_v))
        keys = self._rows(shape, key_size, dtype)
        if shape.is_latent:
            return LayerCache(keys, keys[..., :value_size])
        return LayerCache(keys, self._rows(shape, value_size, dtype))

    def vectors(self, shape: VectorShape | None) -> Tensor | None:
        return None if shape is None else self._vectors(self.block_size, shape)

    def of_compressed(self, shape: CompressedShape | None) -> tuple[Tensor, ...]:
        """Returns raw vectors, and if there are some, index keys."""
        if shape is None:
            return ()
        raw = self._vectors(self.block_size, shape.raw)
        if shape.index is None:
            return (raw,)
        return raw, self._vectors(shape.num_entries(self.block_size), shape.index)

    def _vectors(self, num_each: int, shape: VectorShape) -> Tensor:
        return self.pages.empty((self.num_blocks, num_each, shape.size), shape.dtype, self.device)

    def _rows(self, shape: LayerShape, size: int, dtype: torch.dtype) -> Tensor:
        sizes = self.num_blocks, shape.num_kv_heads, shape.num_rows(self.block_size), size
        return self.pages.empty(sizes, dtype, self.device)


class KVCache:
    """The paged keys and values of all layers. Pages stay unallocated until blocks near them are about to be written
    (`prefault`). Layers may be in groups, each with block tables of its own (`engine.core.kv_groups`): then a block is
    of one group, and layers at the same place of their groups, which have equal shapes, share tensors."""

    hidden: Tensor | None  # [num_blocks, block_size, hidden_size]
    """The hidden state of each token, where they are kept."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        hidden: VectorShape | None = None,
        shared: SharedPages | None = None,
        groups: Sequence[int] = (),
    ) -> None:
        """`shared` is memory that outlives this process, if the cache is to lie there; `groups` has the group of each
        layer, none if all are in one."""
        pages = shared or PrivatePages()
        empty = _EmptyBlocks(pages, num_blocks, block_size, device)
        self.shared = shared
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = tuple(groups) or (0,) * len(layers)
        """Group of each layer."""
        by_place: list[LayerCache] = []
        for layer, place in zip(layers, places_in(self.groups), strict=True):
            if place == len(by_place):
                by_place.append(empty.layer_cache(layer, dtype))
        self.layers = tuple(by_place[place] for place in places_in(self.groups))
        self.index_keys = tuple(empty.vectors(layer.index) for layer in layers)
        """[num_blocks, block_size, index size] of each layer that has such keys."""
        self.compressed = tuple(empty.of_compressed(layer.compressed) for layer in layers)
        """Raw vectors, and index keys of entries if there are some, of each layer with compressed attention."""
        self.hidden = empty.vectors(hidden)
        self._shapes = tuple(layers)
        self._pages = PagePrefault(self._tensors(), pages.allocate)
        self._writing = threading.Lock()  # prefault writes to pages what it read there

    def of_layer(self, layer: int) -> LayerCache:
        """Returns the cache of the model's layer of this number, which has attention."""
        return self.layers[self._places[layer]]

    def index_keys_of(self, layer: int) -> Tensor:
        """Returns the index keys [num_blocks, block_size, index size] of the model's layer of this number."""
        keys = self.index_keys[self._places[layer]]
        assert keys is not None, "the layer has index keys"
        return keys

    def compressed_of(self, layer: int) -> CompressedCache:
        """Returns what the model's layer of this number keeps, which has compressed attention."""
        keys, (raw, *index_keys) = self.of_layer(layer).keys, self.compressed[self._places[layer]]
        rows = keys.view(-1, 1, 1, keys.shape[3])
        return CompressedCache(LayerCache(rows, rows), raw, *index_keys or (None,))

    def group_of(self, layer: int) -> int:
        """Returns the group of the model's layer of this number."""
        return self.groups[self._places[layer]]

    def window_of(self, layer: int) -> int | None:
        """Returns how many positions a token sees in the model's layer of this number; None for all."""
        return self._shapes[self._places[layer]].window

    @property
    def num_groups(self) -> int:
        return max(self.groups, default=0) + 1

    @cached_property
    def _places(self) -> dict[int, int]:
        """The place of each layer by its number; a draft model's come behind those of the model, with the same ones."""
        places: dict[int, int] = {}
        for place, shape in enumerate(self._shapes):
            places.setdefault(place if shape.layer is None else shape.layer, place)
        return places

    def like_it(self, num_blocks: int) -> "KVCache":
        """Returns an empty cache of as many layers of the same shapes, in one group, without hidden states, in memory
        of its own."""
        keys = self.layers[0].keys
        return KVCache(self._shapes, num_blocks, self.block_size, keys.dtype, keys.device)

    def _tensors(self) -> list[Tensor]:
        own = ([each.keys] if each.is_latent else each for each in self.layers)
        tensors = {id(tensor): tensor for tensor in chain.from_iterable(own)}  # groups share them
        kept = (*self.index_keys, *chain.from_iterable(self.compressed), self.hidden)
        return [*tensors.values(), *(each for each in kept if each is not None)]

    def of_layers(self, layers: slice) -> "KVCache":
        """Returns the cache of some of the layers, those of the model or of its draft model, and of hidden states. It
        shares their memory, whose pages the whole cache allocates."""
        part = copy.copy(self)
        part.layers, part._shapes, part.groups = self.layers[layers], self._shapes[layers], self.groups[layers]
        part.index_keys, part.compressed = self.index_keys[layers], self.compressed[layers]
        vars(part).pop("_places", None)
        return part

    def prefault(self, last_block: int, num_tokens: int) -> None:
        """Allocates pages ahead of the blocks in use; to be called before each step.

        `last_block` is the highest block that the step writes, `num_tokens` how many tokens it writes.
        """
        with self._writing:
            self._pages.prefault(last_block, self.num_groups * num_tokens / self.block_size)

    def map_allocated(self, last_block: int) -> None:
        """Maps the pages of the blocks up to this one, which an earlier process has allocated."""
        self._pages.map_allocated(last_block)

    def block_bytes(self, block_id: int) -> list[np.ndarray]:
        """Returns a block's memory in all layers, keys before values, its index keys and its hidden states, each as
        bytes [num_bytes] that may be read while no step writes the block. For the CPU only."""
        return [tensor[block_id].view(-1).view(torch.uint8).numpy() for tensor in self._tensors()]

    def fill_block(self, block_id: int, content: memoryview) -> None:
        """Overwrites a block with the bytes of `block_bytes`, joined. Other threads than that of the steps may call it,
        for blocks that no step reads or writes."""
        start = 0
        with self._writing:
            for part in self.block_bytes(block_id):
                part[:] = np.frombuffer(content[start : start + len(part)], np.uint8)
                start += len(part)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copies blocks, each to another one, in all layers of every group: its keys, values, index keys and hidden
        states. What they do not hold yet is copied, too."""
        for source, target in copies:
            for tensor in self._tensors():
                tensor[target].copy_(tensor[source])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())


def bytes_per_block(
    layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype, groups: Sequence[int] = ()
) -> int:
    """Bytes that one block takes, over all layers, or if they are in groups, over those of one group."""
    places = dict(zip(places_in(groups or (0,) * len(layers)), layers, strict=True))
    return sum(layer.bytes_per_block(block_size, dtype) for layer in places.values())


def places_in(groups: Sequence[int]) -> list[int]:
    """Returns the place of each layer in its group."""
    return [groups[:layer].count(group) for layer, group in enumerate(groups)]
