"""A batch as the flat tensors of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.batch import ScheduledRequest


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The batch's tokens lie one request after the other in one row."""

    token_ids: Tensor  # [1, num_tokens] int64
    positions: Tensor  # [1, num_tokens] int64
    attention: AttentionMetadata


def build_inputs(requests: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> ModelInputs:
    token_ids = np.array([token_id for request in requests for token_id in request.token_ids])
    lengths = np.array([len(request.token_ids) for request in requests])
    context_lens = np.array([request.end for request in requests])
    ends = lengths.cumsum()  # request i has the flat positions [ends[i] - lengths[i], ends[i])
    positions = np.arange(len(token_ids)) + (context_lens - ends).repeat(lengths)
    tables = _block_tables(requests, block_size)
    blocks = tables[np.arange(len(requests)).repeat(lengths), positions // block_size]

    def on_device(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    attention = AttentionMetadata(
        block_tables=on_device(tables),
        cu_seqlens_q=on_device(np.concatenate(([0], ends)).astype(np.int32)),
        context_lens=on_device(context_lens.astype(np.int32)),
        slot_mapping=on_device(blocks.astype(np.int64) * block_size + positions % block_size),
        max_seqlen_q=int(lengths.max()),
        max_context_len=int(context_lens.max()),
    )
    return ModelInputs(token_ids=on_device(token_ids[None]), positions=on_device(positions[None]), attention=attention)


def _block_tables(requests: Sequence[ScheduledRequest], block_size: int) -> NDArray[np.int32]:
    """[num_requests, max_blocks], padded with 0; only the blocks that this step reads or writes."""
    used = [-(-request.end // block_size) for request in requests]
    tables = np.zeros((len(requests), max(used)), dtype=np.int32)
    for row, (request, count) in enumerate(zip(requests, used, strict=True)):
        tables[row, :count] = request.block_table[:count]
    return tables
