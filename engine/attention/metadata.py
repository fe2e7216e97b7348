"""What attention must know beside its tensors: of the step's batch, and of the layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where each sequence's query tokens lie in the flat batch, and where its keys and values lie in the cache.

    The tokens of sequence i are the half-open range [cu_seqlens_q[i], cu_seqlens_q[i + 1]) of the batch. They are the
    last ones of its context, so token j of them has position `context_lens[i] - num_tokens_of_i + j`.
    """

    block_tables: Tensor  # [num_seqs, max_blocks] int32, padded with 0
    cu_seqlens_q: Tensor  # [num_seqs + 1] int32
    context_lens: Tensor  # [num_seqs] int32: entries in the cache once this step's tokens are written
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset of each token's key and value
    max_seqlen_q: int
    max_context_len: int

    def of_single_queries(
        self, block_tables: Tensor, context_lens: Tensor, max_context_len: int
    ) -> "AttentionMetadata":
        """Returns what has each query be a sequence of its own, with a block table [num_queries, most blocks] and a
        context [num_queries] of its own."""
        return AttentionMetadata(
            block_tables=block_tables.int(),
            cu_seqlens_q=torch.arange(len(block_tables) + 1, dtype=torch.int32, device=block_tables.device),
            context_lens=context_lens.int(),
            slot_mapping=self.slot_mapping,
            max_seqlen_q=1,
            max_context_len=max_context_len,
        )


class AttentionParams(NamedTuple):
    """How a layer attends; the same in every step."""

    scaling: float
    """Factor of each score q.k."""
    sliding_window: int | None = None
    """Positions that a token sees, its own included; None for all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None  # [num_heads]
    """One more logit per head, which joins the softmax and has no value."""


class LogScaling(NamedTuple):
    """A factor of scores that grows with the position of the token that attends."""

    first: int
    """How many positions a token sees that is the first whose factor grows."""
    alpha: float

    def factors(self, positions: Tensor) -> Tensor:
        """Returns 1 + alpha * log(positions seen / first), and 1 before that: [num_tokens] float32."""
        ratios = ((positions + 1).double() / self.first).clamp(min=1.0)
        return (1.0 + self.alpha * torch.log(ratios)).float()


class DistanceBias(NamedTuple):
    """What is added to each score by the distance between the two tokens (`engine.attention.distance_bias`)."""

    weights: Tensor  # [num_tokens, num_heads, num_profiles]
    profiles: Tensor  # [num_distances, num_profiles]: those of farther tokens are 0
    log_scaling: LogScaling | None = None
    """What multiplies scores, bias and all."""
    sinks: Tensor | None = None  # [num_tokens, num_heads]
    """One more logit of each token and head, which joins the softmax and has no value."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weights, self.profiles, *(() if self.sinks is None else (self.sinks,)))


class IndexCall(NamedTuple):
    """What decides to which positions each token attends (`engine.attention.sparse`)."""

    query: Tensor  # [num_tokens, num_index_heads, index_size]
    key: Tensor  # [num_tokens, index_size]
    weights: Tensor  # [num_tokens, num_index_heads] float32
    layer: int
    """The layer that keeps the keys. Layers behind it may attend to the positions that it chose."""
    num_chosen: int
    """How many positions a token attends to; all where it sees no more."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.weights


PoolKeys = Callable[[Tensor, Tensor], Tensor]
"""Makes index keys of pools [num_pools, index_size] of what is kept of their positions [num_pools, pool_size, size],
and of the first of these [num_pools]."""


class PoolIndexCall(NamedTuple):
    """What decides to which pools of positions each token attends (`engine.attention.sparse_pools`)."""

    query: Tensor  # [num_tokens, num_index_heads, index_size]
    key: Tensor  # [num_tokens, size]: what is kept of each token, of which keys of pools are made
    weights: Tensor  # [num_tokens, num_index_heads] float32
    pool_keys: PoolKeys
    pool_size: int
    """Positions of a pool, counted from the beginning of each sequence."""
    layer: int
    """The layer that keeps the keys. Layers behind it may attend to the pools that it chose."""
    num_pools: int
    """How many whole pools a token attends to; all where it sees no more."""

    @property
    def num_chosen(self) -> int:
        """How many positions a token attends to at most: those of pools, and some behind them."""
        return (self.num_pools + 1) * self.pool_size - 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.weights


class BlockIndexCall(NamedTuple):
    """What decides to which blocks of positions each token attends (`engine.attention.sparse_blocks`)."""

    query: Tensor  # [num_tokens, num_index_heads, index_size]: each head chooses for a group of attention's
    key: Tensor  # [num_tokens, index_size]
    layer: int
    """The layer that keeps the keys."""
    block_size: int
    """Positions of a block, counted from the beginning of each sequence."""
    num_blocks: int
    """How many blocks a token attends to; all where it sees no more."""
    num_near: int
    """How many of these are its own block and those next before it, whatever their scores are."""

    @property
    def num_chosen(self) -> int:
        """How many positions a token attends to at most."""
        return self.num_blocks * self.block_size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key


AnyIndexCall = IndexCall | PoolIndexCall | BlockIndexCall

Pool = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Makes entries [num_entries, head size], and if the layer chooses among them, their index keys [num_entries, size], of
the raw vectors of their tokens [num_entries, tokens, raw size], and of the position of the first token that each stands
for [num_entries]."""


class CompressedCall(NamedTuple):
    """What a layer with compressed attention attends to beside a window (`engine.attention.compressed`)."""

    raw: Tensor  # [num_tokens, raw size]
    pool: Pool
    ratio: int
    """How many tokens an entry stands for."""
    num_pooled: int
    """How many tokens it is made of: these, and those before them."""
    window: int
    """Positions that a token sees themselves, its own included."""
    choice: IndexCall | None = None
    """What decides to which entries a token attends, with an empty key of an entry's size; None if to all."""
