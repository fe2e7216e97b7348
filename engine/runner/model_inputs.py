"""A batch as the flat tensors of one forward pass."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.core.batch import ScheduledRequest


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The batch's tokens lie one request after the other."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionMetadata


def build_inputs(requests: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> ModelInputs:
    """Made of lists. A step leaves nothing of anybody's code in the processor's caches, so that each function of a
    library takes longer than the numbers of several requests."""
    lengths = [len(request.token_ids) for request in requests]
    context_lens = [request.end for request in requests]
    max_blocks = -(-max(context_lens) // block_size)
    token_ids, positions, slot_mapping = _on_device(
        torch.int64,
        device,
        [token_id for request in requests for token_id in request.token_ids],
        [position for request in requests for position in range(request.start, request.end)],
        [slot for request in requests for slot in _slots(request, block_size)],
    )
    block_tables, cu_seqlens_q, lens = _on_device(
        torch.int32,
        device,
        [block for request in requests for block in _padded_table(request, block_size, max_blocks)],
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
    return ModelInputs(token_ids=token_ids, positions=positions, attention=attention)


def _on_device(dtype: torch.dtype, device: torch.device, *lists: list[int]) -> Sequence[Tensor]:
    """A tensor of each list, all in one piece of memory."""
    numbers = array("q" if dtype is torch.int64 else "i", chain.from_iterable(lists))
    return torch.frombuffer(numbers, dtype=dtype).to(device).split_with_sizes([*map(len, lists)])


def _slots(request: ScheduledRequest, block_size: int) -> list[int]:
    """Of its tokens in this step."""
    table = request.block_table
    return [table[at // block_size] * block_size + at % block_size for at in range(request.start, request.end)]


def _padded_table(request: ScheduledRequest, block_size: int, max_blocks: int) -> tuple[int, ...]:
    """Only the blocks that this step reads or writes, and zeros behind them."""
    used = request.block_table[: -(-request.end // block_size)]
    return (*used, *[0] * (max_blocks - len(used)))
