"""Which KV blocks hold which token prefixes, found by chained hashes; torch-free.

A block's hash covers its tokens and, through its parent's hash, every token before it, the request's salt and the
content of its adapter, so equal hashes mean equal contexts. SHA-256 keeps that true against prompts chosen to collide.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine.core.block_records import BlockRecords, NoBlockRecords
from engine.core.request import Request
from engine.scheduling.block_tokens import BlockTokens, NoBlockTokens

_LEAST_COPIED = 4  # a copy takes as long as the block is, computing as long as the tokens: one in so many must be equal


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What is cached of the beginning of a request's tokens; valid until any block is allocated or freed."""

    num_blocks: int = 0
    tables: tuple[tuple[int, ...], ...] = ()
    """For each group of layers, the blocks that a request needs to go on behind these: all, or those that its next
    token sees. Empty if nothing is cached."""
    state_slot: int | None = None
    """Slot with a copy of the recurrent states after these blocks; None for models without any."""
    copied_blocks: tuple[int, ...] = ()
    """Block of each group of layers whose first tokens are the next ones of the request, for it to copy; none if no
    block has enough of them."""
    num_copied_tokens: int = 0

    def num_tokens(self, block_size: int) -> int:
        return self.num_blocks * block_size + self.num_copied_tokens


class BlockCache(Protocol):
    """What the pool and the scheduler ask of a prefix cache."""

    @property
    def found(self) -> Sequence[int]:
        """The blocks that it holds from the beginning on, the least recently used first."""

    def can_match(self, request: Request) -> bool:
        """Whether to look for the request's prefix at all."""

    def match(self, request: Request, max_blocks: int) -> list[int]:
        """Blocks holding the longest cached prefix of the request's tokens, at most `max_blocks`."""

    def match_partly(self, request: Request, num_blocks: int) -> tuple[tuple[int, ...], int]:
        """Returns the blocks of each group of layers that hold most of the tokens behind the request's first
        `num_blocks` blocks, but for its last token, and how many; ((), 0) if those are few."""

    def find(self, request: Request, index: int, group: int) -> int | None:
        """Returns the block of a group of layers that holds the request's full block `index`; None if none does."""

    def insert(self, request: Request, first: int, last: int) -> list[tuple[int, int]]:
        """Remember the request's blocks [first, last), in all its tables, which are full and computed. Returns index
        and group of layers of those whose tokens no other block holds there."""

    def prefix_hash(self, request: Request, num_blocks: int) -> bytes | None:
        """Returns the hash of the tokens in the request's first full blocks, one or more; None if nothing is cached."""

    def block_of(self, block_hash: bytes) -> int | None:
        """Returns the block of this hash in the first group of layers; None if none is remembered."""

    def blocks_of(self, block_hash: bytes) -> list[int]:
        """Returns the blocks of this hash in all groups."""

    def whole(self, block_hash: bytes) -> tuple[int, ...]:
        """Returns the block of this hash in each group; none if one of them has none."""

    def holds(self, block_id: int) -> bool:
        """Whether a later match may return this block."""

    def touch(self, block_id: int) -> None:
        """Make a block that it holds the most recently used one."""

    def forget(self, block_id: int) -> None:
        """Forget a block that is about to be overwritten."""

    def clear(self) -> None:
        """Forget all blocks."""


class PrefixCache:
    """Maps chained block hashes to block ids. Two requests that compute the same block keep the first one's."""

    def __init__(
        self,
        block_size: int,
        records: BlockRecords | None = None,
        num_groups: int = 1,
        tokens: BlockTokens | None = None,
    ) -> None:
        """`records` are of the same blocks: it holds what they found, and tells them what it holds from now on.
        `tokens` finds blocks that hold a part of what is asked for."""
        self._block_size = block_size
        self._num_groups = num_groups
        self._records = records or NoBlockRecords()
        self._tokens = tokens or NoBlockTokens()
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}
        for block_id, block_hash in self._records.found:
            self._block_of_hash[block_hash], self._hash_of_block[block_id] = block_id, block_hash
        self.found = list(self._hash_of_block)

    def can_match(self, request: Request) -> bool:
        return request.asked.params.prompt_logprobs is None  # the cache holds no logprobs of its tokens

    def match(self, request: Request, max_blocks: int) -> list[int]:
        blocks: list[int] = []
        for block_hash in self.hashes(request, max_blocks):
            block_id = self._block_of_hash.get(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def match_partly(self, request: Request, num_blocks: int) -> tuple[tuple[int, ...], int]:
        start = num_blocks * self._block_size
        tokens = request.token_ids(start, min(start + self._block_size, request.num_tokens - 1))
        num_tokens, block_hash = self._tokens.longest(self._hash_of(request, num_blocks - 1), tokens)
        if num_tokens == 0 or num_tokens * _LEAST_COPIED < self._block_size:
            return (), 0
        blocks = self.whole(block_hash)
        return blocks, num_tokens if blocks else 0

    def insert(self, request: Request, first: int, last: int) -> list[tuple[int, int]]:
        if first >= last:
            return []
        return [
            (index, group)
            for index in range(first, last)
            for group, table in enumerate((request.block_table, *request.window_tables))
            if self.remember(request, index, group, table[index])
        ]

    def find(self, request: Request, index: int, group: int) -> int | None:
        return self._block_of_hash.get(self.key(request, index, group))

    def remember(self, request: Request, index: int, group: int, block_id: int) -> bool:
        """Remembers a block that holds the request's full block `index` in a group of layers; False if another block is
        known that does."""
        block_hash = self._hash_of(request, index)
        if not self.put(_in_group(block_hash, group), block_id):
            return False
        if group == 0:
            start = index * self._block_size
            tokens = partial(request.token_ids, start, start + self._block_size)
            self._tokens.add(self._hash_of(request, index - 1), tokens, block_hash)
        return True

    def key(self, request: Request, index: int, group: int) -> bytes:
        """Returns what names a group's block that holds the request's full block `index`: in the first, its hash."""
        return _in_group(self._hash_of(request, index), group)

    def keys(self, block_hash: bytes) -> list[bytes]:
        """Returns what names the blocks of this hash in all groups."""
        return [_in_group(block_hash, group) for group in range(self._num_groups)]

    def put(self, block_hash: bytes, block_id: int) -> bool:
        """Remembers a block by its name alone; False if another block of that name is known."""
        if block_hash in self._block_of_hash:
            return False
        self._block_of_hash[block_hash] = block_id
        self._hash_of_block[block_id] = block_hash
        self._records.add(block_id, block_hash)
        return True

    def hash_of(self, block_id: int) -> bytes | None:
        """Returns the name by which a later match may return the block; None if none may."""
        return self._hash_of_block.get(block_id)

    def block_of(self, block_hash: bytes) -> int | None:
        return self._block_of_hash.get(block_hash)

    def blocks_of(self, block_hash: bytes) -> list[int]:
        return [self._block_of_hash[key] for key in self.keys(block_hash) if key in self._block_of_hash]

    def whole(self, block_hash: bytes) -> tuple[int, ...]:
        blocks = tuple(self.blocks_of(block_hash))
        return blocks if len(blocks) == self._num_groups else ()

    def prefix_hash(self, request: Request, num_blocks: int) -> bytes | None:
        return self.hashes(request, num_blocks)[-1]

    def holds(self, block_id: int) -> bool:
        return block_id in self._hash_of_block

    def touch(self, block_id: int) -> None:
        self._records.touch(block_id)

    def forget(self, block_id: int) -> None:
        self._records.remove(block_id)
        block_hash = self._hash_of_block.pop(block_id)
        del self._block_of_hash[block_hash]
        self._tokens.remove(block_hash)

    def clear(self) -> None:
        self._records.clear()
        self._tokens.clear()
        self._block_of_hash.clear()
        self._hash_of_block.clear()

    def hashes(self, request: Request, num_blocks: int) -> Sequence[bytes]:
        """The hashes of the request's first `num_blocks` full blocks, remembered in the request as it grows."""
        hashes = request.block_hashes
        while len(hashes) < num_blocks:
            start = len(hashes) * self._block_size
            tokens = request.token_ids(start, start + self._block_size)
            parent = hashes[-1] if hashes else _root(request)
            hashes.append(hashlib.sha256(parent + array("q", tokens).tobytes()).digest())
        return hashes[:num_blocks]

    def _hash_of(self, request: Request, index: int) -> bytes:
        """Returns the hash of the request's full block `index`, and for -1 what stands for one before the first."""
        if index >= len(request.block_hashes):
            self.hashes(request, index + 1)
        return request.block_hashes[index] if index >= 0 else _root(request)


def _in_group(block_hash: bytes, group: int) -> bytes:
    """Returns the hash that stands for a block of this hash in a group of layers, the same one in the first."""
    return block_hash if group == 0 else block_hash[:-1] + bytes((block_hash[-1] ^ group,))


def _root(request: Request) -> bytes:
    """Returns what stands for the hash of the block before the first one."""
    salt = request.asked.cache_salt.encode(errors="surrogatepass")  # no byte of it is 255
    adapter = b"" if request.adapter is None else b"\xff" + bytes.fromhex(request.adapter.digest)
    return hashlib.sha256(salt + adapter).digest()


class NullPrefixCache:
    """Caches nothing: the "off" state."""

    found: Sequence[int] = ()

    def can_match(self, request: Request) -> bool:
        return False

    def match(self, request: Request, max_blocks: int) -> list[int]:
        return []

    def match_partly(self, request: Request, num_blocks: int) -> tuple[tuple[int, ...], int]:
        return (), 0

    def insert(self, request: Request, first: int, last: int) -> list[tuple[int, int]]:
        return []

    def find(self, request: Request, index: int, group: int) -> int | None:
        return None

    def block_of(self, block_hash: bytes) -> int | None:
        return None

    def blocks_of(self, block_hash: bytes) -> list[int]:
        return []

    def whole(self, block_hash: bytes) -> tuple[int, ...]:
        return ()

    def prefix_hash(self, request: Request, num_blocks: int) -> bytes | None:
        return None

    def holds(self, block_id: int) -> bool:
        return False

    def touch(self, block_id: int) -> None:
        raise KeyError(block_id)

    def forget(self, block_id: int) -> None:
        raise KeyError(block_id)

    def clear(self) -> None:
        pass
