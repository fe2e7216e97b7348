"""A batch as the flat tensors of one forward pass."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

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
    """That of the first group of layers."""
    states: StateMetadata | None
    """None for models without recurrent states."""
    adapters: Tensor | None = None  # [num_tokens] int64
    """Number of each token's adapter, -1 for none; None if no token has any."""
    windowed: tuple[AttentionMetadata, ...] = ()
    """That of the other groups of layers, which have block tables of their own."""

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
    token_ids, positions, slot_mapping = _on_device(
        torch.int64,
        device,
        [token_id for request in requests for token_id in request.token_ids],
        [position for request in requests for position in range(request.start, request.end)],
        _slots(requests, block_size),
    )
    block_tables, cu_seqlens_q, lens = _on_device(
        torch.int32,
        device,
        _tables(requests, block_size, max_blocks),
        [*accumulate(lengths, initial=0)],
        context_lens,
    )
    attention = AttentionMetadata(
        block_tables=block_tables.view(len(requests), max_blocks),
        cu_seqlens_q=cu_seqlens_q,
        context_lens=lens,
        slot_mapping=slot_mapping,
        max_seqlen_q=max(lengths),
        max_context_len=max(context_lens),
    )
    windowed = tuple(
        _in_window_group(attention, requests, group, block_size) for group in range(len(requests[0].window_tables))
    )
    states, adapters = _states(requests, device), _adapters(requests, device)
    return ModelInputs(token_ids, positions, attention, states, adapters, windowed)


def _in_window_group(
    first: AttentionMetadata, requests: Sequence[ScheduledRequest], group: int, block_size: int
) -> AttentionMetadata:
    """Returns the metadata of a group of layers with block tables of its own, from that of the first group."""
    own = [replace(request, block_table=request.window_tables[group]) for request in requests]
    (slots,) = _on_device(torch.int64, first.slot_mapping.device, _slots(own, block_size))
    max_blocks = first.block_tables.shape[1]
    (tables,) = _on_device(torch.int32, first.block_tables.device, _tables(own, block_size, max_blocks))
    return replace(first, slot_mapping=slots, block_tables=tables.view_as(first.block_tables))


def _slots(requests: Sequence[ScheduledRequest], block_size: int) -> list[int]:
    return [slot for request in requests for slot in slots_of(request, range(request.start, request.end), block_size)]


def _tables(requests: Sequence[ScheduledRequest], block_size: int, max_blocks: int) -> list[int]:
    return [block for request in requests for block in _padded_table(request, block_size, max_blocks)]


def _adapters(requests: Sequence[ScheduledRequest], device: torch.device) -> Tensor | None:
    if all(request.adapter is None for request in requests):
        return None
    numbers = [-1 if request.adapter is None else request.adapter for request in requests]
    return torch.tensor(numbers, device=device).repeat_interleave(
        torch.tensor([len(request.token_ids) for request in requests], device=device)
    )


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


def _on_device(dtype: torch.dtype, device: torch.device, *lists: list[int]) -> Sequence[Tensor]:
    """Returns a tensor of each list, all in one piece of memory, which is copied to the device once. The host does not
    wait for that: pinned memory is kept until it was read."""
    numbers = torch.frombuffer(array("q" if dtype is torch.int64 else "i", chain.from_iterable(lists)), dtype=dtype)
    numbers = numbers.pin_memory() if device.type == "cuda" else numbers
    return numbers.to(device, non_blocking=True).split_with_sizes([*map(len, lists)])


def slots_of(request: ScheduledRequest, positions: range, block_size: int) -> list[int]:
    """Returns the cache slots of the request's tokens at these positions."""
    table = request.block_table
    return [table[at // block_size] * block_size + at % block_size for at in positions]


def _padded_table(request: ScheduledRequest, block_size: int, max_blocks: int) -> tuple[int, ...]:
    """Returns the blocks that this step reads or writes, padded with zeros to `max_blocks`."""
    used = request.block_table[: -(-request.end // block_size)]
    return (*used, *[0] * (max_blocks - len(used)))
