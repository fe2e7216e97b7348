"""What the first rank tells the others: how to start, the inputs of each forward pass and which tokens it keeps, and
which adapters come and go."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.core.config import EngineConfig
from engine.core.messages import LoadAdapter, UnloadAdapter
from engine.mixers.metadata import StateMetadata
from engine.runner.forward import HiddenOf
from engine.runner.head_passes import HiddenBefore
from engine.runner.model_inputs import ModelInputs

__all__ = [
    "ForwardPass",
    "HeadPass",
    "RankFailure",
    "RankMessage",
    "RankStart",
    "ReleaseAdapter",
    "Settlement",
    "forward_pass_of",
    "head_pass_of",
]


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    config: EngineConfig
    rank: int
    cpus: tuple[int, ...]
    log_level: int


class RankFailure(msgspec.Struct, frozen=True):
    """A rank's last message, if it cannot load its part: the type of the error, and what it says."""

    kind: str
    message: str


class _States(msgspec.Struct, frozen=True):
    """The arguments of `StateMetadata`."""

    slots: list[int]
    lengths: list[int]
    is_first: list[bool]
    restored: list[tuple[int, int]]
    saved: list[tuple[int, int]]
    num_drafts: list[int]

    @classmethod
    def of(cls, states: StateMetadata) -> "_States":
        slots, fresh = states.slots.tolist(), {*states.fresh_slots.tolist()}
        return cls(
            slots,
            [*states.lengths],
            [slot in fresh for slot in slots],
            [*map(tuple, states.restored.tolist())],
            [*map(tuple, states.saved.tolist())],
            [*states.num_drafts],
        )

    def metadata(self, device: torch.device) -> StateMetadata:
        copied = {"restored": self.restored, "saved": self.saved}
        return StateMetadata(self.slots, self.lengths, self.is_first, device, **copied, num_drafts=self.num_drafts)


class ForwardPass(msgspec.Struct, frozen=True, tag=True):
    """One forward pass: which one, and its inputs as bytes of integers. An order to end has no more of them."""

    index: int
    """Which of the rank's forward passes: that of the model, or of its draft model."""
    numbers: bytes  # int64: token ids, positions and slots, [num_tokens] each
    num_tokens: int
    tables: bytes  # int32: context lengths [num_seqs], starts of queries [num_seqs + 1], block tables
    num_seqs: int
    longest: tuple[int, int]
    """The most query tokens, and the longest context, of a sequence."""
    kept: list[int] | None
    states: _States | None
    block_copies: tuple[tuple[int, int], ...] = ()
    """Blocks that are to be copied before the pass, each with the one to which."""
    adapters: bytes | None = None
    """int64: number of each token's adapter, -1 for none, [num_tokens]; None if no token has any."""
    hidden_of: tuple[int, ...] | None = None
    """Which hidden states a head is to keep, if there is one."""

    def inputs(self, device: torch.device) -> ModelInputs:
        token_ids, positions, slot_mapping = _tensor(self.numbers, torch.int64, device).view(3, self.num_tokens)
        tables = _tensor(self.tables, torch.int32, device)
        sizes = (self.num_seqs, self.num_seqs + 1, len(tables) - 2 * self.num_seqs - 1)
        context_lens, cu_seqlens_q, blocks = tables.split_with_sizes(sizes)
        attention = AttentionMetadata(
            block_tables=blocks.view(self.num_seqs, -1),
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            slot_mapping=slot_mapping,
            max_seqlen_q=self.longest[0],
            max_context_len=self.longest[1],
        )
        states = None if self.states is None else self.states.metadata(device)
        adapters = None if self.adapters is None else _tensor(self.adapters, torch.int64, device)
        return ModelInputs(token_ids, positions, attention, states, adapters, block_copies=self.block_copies)


class Settlement(msgspec.Struct, frozen=True, tag=True):
    """The end of a step with draft tokens: which forward pass, and how many of each sequence's tokens are kept."""

    index: int
    num_kept: list[int]


class HeadPass(msgspec.Struct, frozen=True, tag=True):
    """A pass of the head that drafts: its inputs, and which hidden states it reads, as `HiddenBefore` has them."""

    forward_pass: ForwardPass
    slots: list[int]
    rows: list[int] | None


class ReleaseAdapter(msgspec.Struct, frozen=True, tag=True):
    """The end of an unloaded adapter, of which no request is left."""

    number: int


RankMessage = ForwardPass | HeadPass | Settlement | LoadAdapter | UnloadAdapter | ReleaseAdapter
"""What a rank hears after it has loaded its part of the model."""


def forward_pass_of(index: int, inputs: ModelInputs, kept: Any, hidden_of: HiddenOf = None) -> ForwardPass:
    """Returns the message about a forward pass of these inputs. Of those on a device, the host waits for two copies."""
    paged = inputs.attention
    return ForwardPass(
        index,
        _bytes(inputs.token_ids, inputs.positions, paged.slot_mapping),
        len(inputs.token_ids),
        _bytes(paged.context_lens, paged.cu_seqlens_q, paged.block_tables),
        len(paged.context_lens),
        (paged.max_seqlen_q, paged.max_context_len),
        None if kept is None else [*kept],
        None if inputs.states is None else _States.of(inputs.states),
        inputs.block_copies,
        None if inputs.adapters is None else _bytes(inputs.adapters),
        hidden_of,
    )


def head_pass_of(inputs: ModelInputs, before: HiddenBefore, kept: Sequence[int]) -> HeadPass:
    """Returns the message about a pass of the head."""
    rows = None if before.rows is None else [*before.rows]
    return HeadPass(forward_pass_of(0, inputs, kept), [*before.slots], rows)


def _bytes(*tensors: Tensor) -> bytes:
    return torch.cat([tensor.flatten() for tensor in tensors]).cpu().numpy().tobytes()


def _tensor(numbers: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(numbers), dtype=dtype).to(device)
