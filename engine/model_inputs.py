"""A batch as the flat tensors of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.batch import ScheduledRequest
from engine.kv_cache import slots


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The batch's tokens lie one request after the other in one row."""

    token_ids: Tensor  # [1, num_tokens] int64
    positions: Tensor  # [1, num_tokens] int64
    attention: AttentionMetadata


def build_inputs(requests: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> ModelInputs:
    tokens = [token_id for request in requests for token_id in request.token_ids]
    positions = [position for request in requests for position in range(request.start, request.end)]
    lengths = [len(request.token_ids) for request in requests]
    context_lens = [request.end for request in requests]
    slot_mapping = np.concatenate([slots(r.block_table, r.start, r.end, block_size) for r in requests])
    attention = AttentionMetadata(
        block_tables=_block_tables(requests, block_size).to(device),
        cu_seqlens_q=_int32([0, *accumulate(lengths)]).to(device),
        context_lens=_int32(context_lens).to(device),
        slot_mapping=torch.from_numpy(slot_mapping).to(device),
        max_seqlen_q=max(lengths),
        max_context_len=max(context_lens),
    )
    return ModelInputs(
        token_ids=torch.tensor([tokens], device=device),
        positions=torch.tensor([positions], device=device),
        attention=attention,
    )


def _block_tables(requests: Sequence[ScheduledRequest], block_size: int) -> Tensor:
    """[num_requests, max_blocks] int32, padded with 0; only the blocks that this step reads or writes."""
    used = [-(-request.end // block_size) for request in requests]
    tables = np.zeros((len(requests), max(used)), dtype=np.int32)
    for row, (request, count) in enumerate(zip(requests, used, strict=True)):
        tables[row, :count] = request.block_table[:count]
    return torch.from_numpy(tables)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
