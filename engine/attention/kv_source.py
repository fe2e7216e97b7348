"""Where the keys, values and gates of an attention come from: from projections of their own, or from others'."""

from collections.abc import MutableMapping
from typing import Literal, NamedTuple

from torch import Tensor

__all__ = ["OWN_KV", "Gates", "KVSource", "LentKV", "Values", "head_counts", "projected_heads"]

Values = Literal["projected", "of keys", "of another layer"]
"""Values "of keys" are what keys are before they are normed and rotated; "of another layer" are keys, too."""

Gates = Literal["none", "of queries", "projected"]
"""Gates, whose sigmoids multiply what is attended to: those "of queries" follow each head in the projection of queries,
others are projected by a layer of their own."""

LentKV = MutableMapping[str, tuple[Tensor, Tensor]]
"""Keys and values [1, num_kv_heads, T, head_size] of layers that lend them, in a step, by the kind of these layers."""


def head_counts(values: Values, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Returns how many heads of queries, keys and values are projected, as far as they are."""
    return {
        "projected": (num_heads, num_kv_heads, num_kv_heads),
        "of keys": (num_heads, num_kv_heads),
        "of another layer": (num_heads,),
    }[values]


def projected_heads(values: Values, gates: Gates, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Returns of how many heads each projection has columns: those of queries, keys and values, as far as there are
    such, and of gates."""
    query, *others = head_counts(values, num_heads, num_kv_heads)
    if gates == "of queries":
        return 2 * query, *others
    return query, *others, *((num_heads,) if gates == "projected" else ())


class KVSource(NamedTuple):
    """Where an attention takes its keys and values from, and to whom it gives them."""

    values: Values = "projected"
    kind: str = ""
    """The kind of layers, of which one lends keys and values to others."""
    lends: bool = False

    def exchanged(self, key: Tensor | None, value: Tensor | None, lent: LentKV | None) -> tuple[Tensor, Tensor]:
        """Returns what is attended to, [T, num_kv_heads, head_size] each, and lends it to others."""
        if self.values == "of another layer":
            assert lent is not None, "such a layer is told what others lend"
            key, value = (each[0].transpose(0, 1) for each in lent[self.kind])
        assert key is not None and value is not None, "a layer has keys and values of its own, or another's"
        if self.lends:
            assert lent is not None, "such a layer is told where to"
            lent[self.kind] = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        return key, value


OWN_KV = KVSource()
