"""How paged attention is cut up into programs: by a layer's shape, and to give all of a GPU work.

No cut changes a bit of a result. That this holds of decode steps' tiles, which have fewer query rows than those of
prefill steps, the GPU at hand has to show (`engine.kernels.cuda.decode_probe`).
"""

import functools
import math
from typing import NamedTuple

import torch
import triton

from engine.kernels.cuda.shared_memory import shared_bytes

__all__ = ["SPLIT", "Layer", "Plan", "Tile", "decode_tile", "plan_for", "prefill_tile"]

SPLIT = 256
"""Positions of a split."""
_DECODE_PROGRAMS = 4  # for each multiprocessor
_PREFILL_PROGRAMS = 1  # fewer: what parts of many rows write takes longer than to fill the GPU gains
_DECODE_BYTES = 64 << 10  # of keys and values on their way, so that several programs fit into a multiprocessor
_FEWEST_ROWS = 16


class Tile(NamedTuple):
    """How much of a layer one program holds: as much as registers and shared memory have room for."""

    rows: int  # of queries, a token's heads after another's
    keys: int
    num_warps: int
    num_stages: int


# By the bytes of a key and a value. Float32 is multiplied without tensor cores.
_TILES = {256: Tile(64, 64, 4, 2), 512: Tile(128, 64, 8, 2), 768: Tile(64, 64, 8, 2), 1024: Tile(32, 32, 8, 2)}
_TILES_IN_FLOAT32 = {1024: Tile(64, 32, 8, 2), 2048: Tile(16, 32, 8, 1)}
_TILES_OF_FEW_BITS = _TILES | {512: Tile(64, 64, 8, 2)}
_LARGEST_TILE = Tile(16, 32, 8, 2)
_LARGEST_TILE_OF_FEW_BITS = Tile(16, 16, 8, 2)
_TILE_OF_FEW_BITS_IN_FLOAT32 = Tile(16, 16, 8, 1)
_LARGEST_TILE_IN_FLOAT32 = Tile(16, 16, 8, 1)
_UNALIGNED_TILE = Tile(16, 16, 4, 2)
_ALIGNED = 8
"""Heads of a multiple of so many numbers lie at multiples of 16 bytes. Of others, in 16 bits, wider tiles are compiled
to code that reads elsewhere (Triton 3.6, on Hopper: test_all_sizes_of_heads_and_values there)."""


class Layer(NamedTuple):
    """What a plan has to know of a layer."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    size: int
    size_v: int
    kv_bits: int = 0
    """Bits of a number in the cache, 8 or 4; 0 where it has plain ones."""
    is_latent: bool = False
    """Whether values are the first numbers of keys, and lie in the cache as these."""

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def padded(self) -> tuple[int, int]:
        least = 32 if self.kv_bits else 16
        size, size_v = (max(least, triton.next_power_of_2(size)) for size in (self.size, self.size_v))
        return size, size_v

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the cache; that of the numbers where these are plain."""
        return {8: torch.int8, 4: torch.uint8}.get(self.kv_bits, self.dtype)

    @property
    def row_sizes(self) -> tuple[int, int]:
        """How many elements of the cache a key and a value take."""
        if not self.kv_bits:
            return self.size, self.size_v
        size, size_v = (size * self.kv_bits // 8 + 2 * triton.cdiv(size, 32) for size in (self.size, self.size_v))
        return size, size_v

    @property
    def num_levels_v(self) -> int:
        """How many levels lie before the scales of a value."""
        return self.size if self.is_latent else self.size_v

    @property
    def alignment(self) -> int:
        """How many bytes the addresses of quantized rows are multiples of; a power of two."""
        return math.gcd(*self.row_sizes, 16)


class Plan(NamedTuple):
    """A cut of the work of one layer and batch."""

    num_tiles: int  # of query rows
    num_groups: int  # of heads that share keys
    num_parts: int  # programs that share the splits of a tile
    constants: dict[str, int]
    """By which the kernel is compiled."""

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.num_tiles, self.num_groups, self.num_parts

    @classmethod
    def of(cls, layer: Layer, tile: Tile, num_tokens: int, num_seqs: int, num_parts: int) -> "Plan":
        """Returns the cut into such tiles and so many parts; one with several tokens of a sequence has room for each
        sequence's tiles."""
        heads = min(triton.next_power_of_2(layer.group), tile.rows)
        tokens = tile.rows // heads
        num_tiles = num_seqs if num_tokens == num_seqs else num_tokens // tokens + num_seqs
        size, size_v = layer.padded
        constants = {"GROUP": layer.group, "HEADS": heads, "TOKENS": tokens, "TILE": tile.keys}
        constants |= {"SIZE": layer.size, "SIZE_PADDED": size, "SIZE_V": layer.size_v, "SIZE_V_PADDED": size_v}
        constants |= {"KV_BITS": layer.kv_bits, "LEVELS_V": layer.num_levels_v, "ALIGNED": layer.alignment}
        constants |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return cls(num_tiles, layer.num_kv_heads * triton.cdiv(layer.group, heads), num_parts, constants)


@functools.lru_cache(maxsize=64)  # all layers of a step ask for the same
def plan_for(layer: Layer, num_tokens: int, num_seqs: int, max_context_len: int, is_decode_exact: bool) -> Plan:
    """Returns the plan for so many tokens and sequences, whose contexts have at most that length. Decode steps have
    tiles of their own if these give the bits of prefill."""
    is_decode = num_tokens == num_seqs and is_decode_exact
    tile = decode_tile(layer) if is_decode else prefill_tile(layer)
    whole = Plan.of(layer, tile, num_tokens, num_seqs, 1)
    wanted = (_DECODE_PROGRAMS if num_tokens == num_seqs else _PREFILL_PROGRAMS) * _num_processors(layer.device)
    num_parts = wanted // (whole.num_tiles * whole.num_groups)
    return whole._replace(num_parts=max(1, min(triton.cdiv(max_context_len, SPLIT), num_parts)))


def prefill_tile(layer: Layer) -> Tile:
    """Returns the tile for many query rows, with as many stages as the GPU has shared memory for."""
    tile, (size, size_v) = _prefill_tile(layer), layer.padded
    num_bytes = tile.keys * (tile.num_stages * size + size_v) * layer.dtype.itemsize
    return tile if num_bytes <= shared_bytes(layer.device) else tile._replace(num_stages=1)


def _prefill_tile(layer: Layer) -> Tile:
    num_bytes, is_wide = sum(layer.padded) * layer.dtype.itemsize, layer.dtype == torch.float32
    if not is_wide and (layer.size % _ALIGNED or layer.size_v % _ALIGNED):
        return _UNALIGNED_TILE
    if is_wide and layer.kv_bits:
        return _TILE_OF_FEW_BITS_IN_FLOAT32
    tiles, largest = _TILES, _LARGEST_TILE
    if is_wide:
        tiles, largest = _TILES_IN_FLOAT32, _LARGEST_TILE_IN_FLOAT32
    elif layer.kv_bits:
        tiles, largest = _TILES_OF_FEW_BITS, _LARGEST_TILE_OF_FEW_BITS
    return next((tile for limit, tile in tiles.items() if num_bytes <= limit), largest)


def decode_tile(layer: Layer) -> Tile:
    """Returns the tile with as many rows as a token has heads with the same keys, and the same keys as in prefill."""
    tile = prefill_tile(layer)
    rows = min(tile.rows, max(_FEWEST_ROWS, triton.next_power_of_2(layer.group)))
    if rows == tile.rows:
        return tile
    key_bytes = sum(layer.padded) * layer.dtype.itemsize * tile.keys
    return Tile(rows, tile.keys, min(4, tile.num_warps), max(1, min(4, _DECODE_BYTES // key_bytes)))


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
