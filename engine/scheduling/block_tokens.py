"""Which cached block agrees longest with the tokens of a request behind a prefix; torch-free.

So a request shares the first tokens of a block with others, though it goes on otherwise within it: a copy of the block
becomes its own.
"""

import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Protocol

TokensOf = Callable[[], Sequence[int]]
"""Returns the tokens of a block."""

_TOKEN_BYTES = 4


class BlockTokens(Protocol):
    """What the prefix cache remembers of its blocks' tokens."""

    def add(self, parent: bytes, token_ids: TokensOf, block_hash: bytes) -> None:
        """Remembers a block by its hash: its tokens, which it asks for if it keeps them, and the hash of what is before
        them."""

    def remove(self, block_hash: bytes) -> None:
        """Forgets a block, if it is remembered."""

    def longest(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, bytes]:
        """Returns how many of the tokens, from the first on, are those of some block behind `parent`, and its hash: of
        the block for which they are most; (0, b"") if there is none."""

    def clear(self) -> None:
        """Forgets all blocks."""


class SortedBlockTokens:
    """Keeps the blocks behind each prefix in the order of their tokens: those that agree longest with others lie where
    these would."""

    def __init__(self) -> None:
        self._blocks_behind: dict[bytes, list[tuple[bytes, bytes]]] = {}  # tokens and hashes, in order
        self._place_of: dict[bytes, tuple[bytes, bytes]] = {}  # what is before a block, and its tokens

    def add(self, parent: bytes, token_ids: TokensOf, block_hash: bytes) -> None:
        tokens = _ordered(token_ids())
        insort(self._blocks_behind.setdefault(parent, []), (tokens, block_hash))
        self._place_of[block_hash] = parent, tokens

    def remove(self, block_hash: bytes) -> None:
        if (place := self._place_of.pop(block_hash, None)) is None:
            return
        parent, tokens = place
        blocks = self._blocks_behind[parent]
        del blocks[bisect_left(blocks, (tokens, block_hash))]
        if not blocks:
            del self._blocks_behind[parent]

    def longest(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, bytes]:
        blocks, tokens = self._blocks_behind.get(parent, []), _ordered(token_ids)
        place = bisect_left(blocks, (tokens, b""))
        neighbours = blocks[max(place - 1, 0) : place + 1]
        return max(((_num_equal(tokens, other), block_hash) for other, block_hash in neighbours), default=(0, b""))

    def clear(self) -> None:
        self._blocks_behind.clear()
        self._place_of.clear()


class NoBlockTokens:
    """Remembers nothing: the state of models whose layers have recurrent states, which no block holds."""

    def add(self, parent: bytes, token_ids: TokensOf, block_hash: bytes) -> None:
        pass

    def remove(self, block_hash: bytes) -> None:
        pass

    def longest(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, bytes]:
        return 0, b""

    def clear(self) -> None:
        pass


def _ordered(token_ids: Sequence[int]) -> bytes:
    """Returns bytes that are in the order of the tokens."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


def _num_equal(tokens: bytes, others: bytes) -> int:
    pairs = enumerate(zip(tokens, others, strict=False))
    num_bytes = next((index for index, (one, other) in pairs if one != other), min(len(tokens), len(others)))
    return num_bytes // _TOKEN_BYTES
