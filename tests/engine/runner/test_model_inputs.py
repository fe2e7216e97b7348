"""A batch becomes flat tensors: each token with its position and slot, each request with its blocks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.runner.model_inputs import ModelInputs, build_inputs

BLOCK_SIZE = 4
LARGEST_BLOCK = (1 << 31) - 1

requests = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=6)


def scheduled(number: int, start: int, num_tokens: int, num_spare: int) -> ScheduledRequest:
    num_blocks = -(-(start + num_tokens) // BLOCK_SIZE) + num_spare
    blocks = tuple(LARGEST_BLOCK - 100 * number - index for index in range(num_blocks))
    tokens = range(1000 * number, 1000 * number + num_tokens)
    return ScheduledRequest(str(number), tokens, start, blocks, SamplingParams(), [], [], True)


def inputs_of(batch: list[ScheduledRequest]) -> ModelInputs:
    return build_inputs(batch, BLOCK_SIZE, torch.device("cpu"))


@given(requests)
def test_every_token_has_its_position_and_its_slot(shapes: list[tuple[int, int, int]]) -> None:
    batch = [scheduled(number, *shape) for number, shape in enumerate(shapes)]
    inputs = inputs_of(batch)
    flat = [(each, position) for each in batch for position in range(each.start, each.end)]
    assert inputs.token_ids.tolist() == [each.token_ids[position - each.start] for each, position in flat]
    assert inputs.positions.tolist() == [position for _, position in flat]
    slots = [each.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for each, at in flat]
    assert inputs.attention.slot_mapping.tolist() == slots


@given(requests)
def test_every_request_has_its_context_and_the_blocks_of_it(shapes: list[tuple[int, int, int]]) -> None:
    batch = [scheduled(number, *shape) for number, shape in enumerate(shapes)]
    paged = inputs_of(batch).attention
    used = [-(-each.end // BLOCK_SIZE) for each in batch]
    for row, each, count in zip(paged.block_tables.tolist(), batch, used, strict=True):
        assert row == [*each.block_table[:count], *[0] * (max(used) - count)]
    assert paged.context_lens.tolist() == [each.end for each in batch]
    assert paged.cu_seqlens_q.tolist() == [sum(shape[1] for shape in shapes[:n]) for n in range(len(shapes) + 1)]
    assert (paged.max_seqlen_q, paged.max_context_len) == (
        max(shape[1] for shape in shapes),
        max(each.end for each in batch),
    )


def test_numbers_have_the_formats_that_attention_takes() -> None:
    inputs = inputs_of([scheduled(0, 3, 2, 0), scheduled(1, 0, 1, 0)])
    paged = inputs.attention
    assert {each.dtype for each in (inputs.token_ids, inputs.positions, paged.slot_mapping)} == {torch.int64}
    assert {each.dtype for each in (paged.block_tables, paged.cu_seqlens_q, paged.context_lens)} == {torch.int32}
