"""Which attention layers share a block of the KV cache: plain data, no torch.

A layer that sees a window of the context needs less of it than one that sees everything. So a block holds the keys and
values of one *group* of layers, each group has as many layers as fit into a block, and a request has a block table for
each group. A windowed group gives back the blocks that no later token can see.
"""

from collections.abc import Sequence

import msgspec

__all__ = ["ONE_GROUP", "KVGroups", "groups_of"]

_MOST_UNUSED = 8  # places for layers in the blocks of all groups: at most one in so many stays empty


class KVGroups(msgspec.Struct, frozen=True):
    """The groups of a model's attention layers: at most one that sees everything, which is the first, then windowed
    ones of equal window."""

    of_layers: tuple[int, ...] = ()
    """Group of each attention layer; empty if all are in the first."""
    num_groups: int = 1
    window: int | None = None
    """Positions that a token sees in the windowed groups, its own included; None if there are none."""

    @property
    def num_full(self) -> int:
        """Number of groups that see everything."""
        return 0 if self.window is not None and self.num_groups == 1 else 1

    @property
    def num_windowed(self) -> int:
        return self.num_groups - self.num_full

    def first_visible_block(self, position: int, block_size: int) -> int:
        """Returns the first block that a token at `position`, or after it, sees in the windowed groups."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def most_windowed(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Returns the most blocks of a windowed group that a context of `num_tokens` holds while no step computes more
        than `max_chunk` of them."""
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        return min(num_blocks, -(-(self.window - 1 + max_chunk) // block_size) + 1)

    def num_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Returns the most blocks that a context of `num_tokens` holds, in all groups together."""
        windowed = self.most_windowed(num_tokens, block_size, max_chunk)
        return self.num_full * -(-num_tokens // block_size) + self.num_windowed * windowed

    def max_tokens(self, num_blocks: int, block_size: int, max_chunk: int, limit: int) -> int:
        """Returns the longest context, of at most `limit` tokens, that `num_blocks` blocks hold."""
        if self.num_blocks(limit, block_size, max_chunk) <= num_blocks:
            return limit
        most = self.most_windowed(limit, block_size, max_chunk)
        in_each = min(num_blocks // self.num_groups, most)  # blocks of each group, while nothing is given back
        return min(limit, block_size * max(in_each, num_blocks - self.num_windowed * most if self.num_full else 0))


ONE_GROUP = KVGroups()
"""All layers see everything, or are treated so."""


def groups_of(windows: Sequence[int | None]) -> KVGroups:
    """Returns the groups of layers of these windows, None for a layer that sees everything. Where too much of the
    blocks would stay empty, all are in one group."""
    if not any(windows):
        return ONE_GROUP
    window = max(each for each in windows if each is not None)
    size = windows.count(None)
    if size == 0:
        return KVGroups(window=window)
    num_windowed = -(-(len(windows) - size) // size)
    if (1 + num_windowed) * size - len(windows) > len(windows) / _MOST_UNUSED:
        return ONE_GROUP
    groups: list[int] = []
    for each in windows:
        groups.append(0 if each is None else 1 + sum(1 for group in groups if group) // size)
    return KVGroups(tuple(groups), 1 + num_windowed, window)
