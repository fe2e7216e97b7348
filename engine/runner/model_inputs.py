"""A batch as the flat tensors of one forward pass."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat

import torch
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.core.batch import ScheduledRequest
from engine.mixers.metadata import StateMetadata


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Tensors of one forward pass, in which the tokens of a batch lie one request after the other."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    """Metadata of the first group of layers."""
    states: StateMetadata | None
    """None for models without recurrent states."""
    adapters: Tensor | None = None  # [num_tokens] int64
    """Number of each token's adapter, -1 for none; None if no token has any."""
    windowed: tuple[AttentionMetadata, ...] = ()
    """Metadata of the other groups of layers, which have block tables of their own."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """Blocks that were copied before the forward pass, each with the one to which: other ranks do it, too."""

    @property
    def groups(self) -> tuple[AttentionMetadata, ...]:
        """The metadata of each group of layers."""
        return self.attention, *self.windowed


def build_inputs(requests: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> ModelInputs:
    """Builds the tensors of one forward pass over `requests`.

    They are built from plain lists: a step evicts all code from the CPU's caches, so each call of a library function
    takes longer than a loop over the numbers of several requests.
    """
    lengths = [len(request.token_ids) for request in requests]
    context_lens = [request.end for request in requests]
    max_blocks = -(-max(context_lens) // block_size)
    positions_of = [range(request.start, request.end) for request in requests]
    tables_of_groups = [[request.block_table for request in requests]]
    tables_of_groups += map(list, zip(*(request.window_tables for request in requests), strict=True))
    token_ids, positions, *slot_mappings = _on_device(
        torch.int64,
        device,
        [token_id for request in requests for token_id in request.token_ids],
        [*chain.from_iterable(positions_of)],
        *(slots_of(tables, positions_of, block_size) for tables in tables_of_groups),
    )
    *block_tables, cu_seqlens_q, lens = _on_device(
        torch.int32,
        device,
        *(_padded(tables, context_lens, block_size, max_blocks) for tables in tables_of_groups),
        [*accumulate(lengths, initial=0)],
        context_lens,
    )
    groups = [
        AttentionMetadata(
            block_tables=tables.view(len(requests), max_blocks),
            cu_seqlens_q=cu_seqlens_q,
            context_lens=lens,
            slot_mapping=slots,
            max_seqlen_q=max(lengths),
            max_context_len=max(context_lens),
        )
        for tables, slots in zip(block_tables, slot_mappings, strict=True)
    ]
    states, adapters = _states(requests, device), _adapters(requests, device)
    return ModelInputs(token_ids, positions, groups[0], states, adapters, tuple(groups[1:]))


def _padded(
    tables: Sequence[Sequence[int]], context_lens: Sequence[int], block_size: int, max_blocks: int
) -> "array[int]":
    """Returns the blocks that this step reads or writes, those of each table padded with zeros to `max_blocks`."""
    padded = array("i")
    for table, length in zip(tables, context_lens, strict=True):
        num_used = -(-length // block_size)
        padded.extend(table[:num_used])
        padded.frombytes(bytes(padded.itemsize * (max_blocks - num_used)))
    return padded


def _adapters(requests: Sequence[ScheduledRequest], device: torch.device) -> Tensor | None:
    if all(request.adapter is None for request in requests):
        return None
    numbers = array("q")  # repeating them in torch wakes its threads, which then wait where those of the kernels work
    for request in requests:
        numbers.extend(repeat(-1 if request.adapter is None else request.adapter, len(request.token_ids)))
    return torch.tensor(numbers, device=device)


def _states(requests: Sequence[ScheduledRequest], device: torch.device) -> StateMetadata | None:
    own = [(request, request.state_slot) for request in requests if request.state_slot is not None]
    if not own:
        return None
    return StateMetadata(
        [slot for _, slot in own],
        [len(request.token_ids) for request, _ in own],
        [request.start == 0 for request, _ in own],
        device,
        restored=[(request.restored_slot, slot) for request, slot in own if request.restored_slot is not None],
        saved=[(slot, request.saved_slot) for request, slot in own if request.saved_slot is not None],
        num_drafts=[request.num_drafts for request, _ in own],
    )


def _on_device(dtype: torch.dtype, device: torch.device, *parts: "Sequence[int] | array[int]") -> Sequence[Tensor]:
    """Returns a tensor of each part, all in one piece of memory, which is copied to the device once. The host does not
    wait for that: pinned memory is kept until it was read."""
    joined = array("q" if dtype is torch.int64 else "i")
    for part in parts:
        joined.extend(part)
    numbers = torch.frombuffer(joined, dtype=dtype)
    numbers = numbers.pin_memory() if device.type == "cuda" else numbers
    return numbers.to(device, non_blocking=True).split_with_sizes([*map(len, parts)])


def slots_of(tables: Sequence[Sequence[int]], positions_of: Sequence[range], block_size: int) -> list[int]:
    """Returns the cache slots of the tokens at these positions of each request, whose block tables these are."""
    pairs = zip(tables, positions_of, strict=True)
    return [table[at // block_size] * block_size + at % block_size for table, positions in pairs for at in positions]
