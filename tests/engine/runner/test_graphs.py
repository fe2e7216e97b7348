"""Decode steps that are recorded once: batches filled up to a recorded size, on memory that stays where it is."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.mixers.metadata import StateMetadata
from engine.runner.forward import ForwardOutput, HiddenOf
from engine.runner.graphs import GraphedForward, StaticInputs, graph_sizes
from engine.runner.host_transfers import HostTransferError, NoHostTransfers
from engine.runner.model_inputs import ModelInputs, build_inputs

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_MODEL_LEN, MAX_SEQS = 4, 30, 11


class Rows:
    """A forward pass of decode steps whose results are made of each row's inputs, as far as a model reads them."""

    name = "rows"

    def __init__(self) -> None:
        self.written: set[int] = set()
        self.calls: list[tuple[int, int]] = []  # how many rows, and where they lay
        self.contexts: list[int] = []  # of the last call

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf = None) -> ForwardOutput:
        attention = inputs.attention
        self.calls.append((len(inputs.token_ids), inputs.token_ids.data_ptr()))
        self.contexts = attention.context_lens.numpy().tolist()
        self.written |= set(attention.slot_mapping.numpy().tolist())
        starts = torch.arange(attention.block_tables.shape[1]) * BLOCK_SIZE
        blocks = attention.block_tables * (starts < attention.context_lens[:, None])
        sums = (blocks * (starts + 1)).sum(1)
        hidden = torch.stack([inputs.token_ids, inputs.positions, attention.context_lens, sums], 1).float()
        return ForwardOutput(hidden * 2, hidden)


def replayed(run: Callable[[], None]) -> Callable[[], None]:
    """A capture that records nothing: what it returns runs the function again."""
    return run


def step_of(contexts: Sequence[int]) -> ModelInputs:
    """Returns the inputs of a token of each sequence, whose contexts have these lengths with it."""
    requests = [
        ScheduledRequest(
            str(seq), [seq + 5], length - 1, (*range(seq * 8, seq * 8 + 8),), SamplingParams(), [], [], True
        )
        for seq, length in enumerate(contexts)
    ]
    return build_inputs(requests, BLOCK_SIZE, CPU)


def graphed(plain: Rows, sizes: Sequence[int] = (1, 4, MAX_SEQS)) -> GraphedForward:
    return GraphedForward(plain, StaticInputs(MAX_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, CPU), sizes, replayed)


@given(steps=st.lists(st.lists(st.integers(1, MAX_MODEL_LEN), min_size=1, max_size=MAX_SEQS), min_size=1, max_size=4))
@torch.inference_mode()
def test_recorded_steps_give_the_results_of_plain_ones(steps: list[list[int]]) -> None:
    forward = graphed(Rows())
    for contexts in steps:
        recorded, plain = forward(step_of(contexts), None), Rows()(step_of(contexts), None)
        assert torch.equal(recorded.logits, plain.logits) and torch.equal(recorded.hidden, plain.hidden)


@torch.inference_mode()
def test_they_are_filled_up_to_a_size_on_the_same_memory_and_write_nothing_more() -> None:
    plain = Rows()
    forward = graphed(plain)
    assert [size for size, _ in plain.calls] == [MAX_SEQS, MAX_SEQS, 4, 1] and plain.written == {-1}
    places = dict(plain.calls)
    for contexts in ([9] * 11, [3] * 3, [7]):
        plain.calls.clear()
        plain.written.clear()
        forward(step_of(contexts), None)
        ((size, place),) = plain.calls
        assert size == {11: 11, 3: 4, 1: 1}[len(contexts)] and place == places[size]
        assert plain.contexts == contexts + [0] * (size - len(contexts))
        assert plain.written - {-1} == set(step_of(contexts).attention.slot_mapping.tolist())


@torch.inference_mode()
def test_other_steps_run_as_they_are() -> None:
    plain = Rows()
    forward, inputs = graphed(plain), step_of([3, 4])
    two_tokens = replace(inputs, attention=replace(inputs.attention, max_seqlen_q=2))
    others: list[tuple[ModelInputs, list[int] | None, HiddenOf]] = [
        (two_tokens, None, None),
        (inputs, [1], None),
        (inputs, None, ()),
        (replace(inputs, states=StateMetadata([0, 1], [1, 1], [False, False], CPU)), None, None),
        (replace(inputs, adapters=torch.tensor([0, -1])), None, None),
        (step_of([3] * (MAX_SEQS + 1)), None, None),
        (step_of([3, MAX_MODEL_LEN + 1]), None, None),
    ]
    for step, kept, hidden_of in others:
        plain.calls.clear()
        forward(step, kept, hidden_of)
        assert plain.calls == [(len(step.token_ids), step.token_ids.data_ptr())]


def test_a_model_that_waits_for_the_device_is_told_by_the_operation() -> None:
    class Waiting(Rows):
        def __call__(self, *args: object, **options: object) -> ForwardOutput:
            raise AssertionError(torch.ones(2).nonzero())

    with pytest.raises(HostTransferError, match="nonzero"):
        graphed(Waiting())


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x[x > 1],
        lambda x: x.index_put_((x > 1,), x[:1]),
        lambda x: x.repeat_interleave(x),
        lambda x: x.to("meta"),
        lambda x: torch.empty(3, device="meta").copy_(x),
    ],
)
def test_what_waits_for_the_device_is_found(wait: Callable[[torch.Tensor], object]) -> None:
    with NoHostTransfers(), pytest.raises(HostTransferError):
        wait(torch.tensor([1, 2, 3]))


def test_what_does_not_wait_may_run() -> None:
    with NoHostTransfers():
        x = torch.arange(6).float()
        x[:2].copy_(x[4:] * 2)
        torch.where(x > 1, x, 0.0).sum().to(torch.int32)
        x.repeat_interleave(2)
        torch.repeat_interleave(torch.tensor([1, 2]), output_size=3)


def test_sizes_are_close_to_one_another() -> None:
    assert graph_sizes(1) == (1,) and graph_sizes(5) == (1, 2, 4, 5) and graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    for most in (64, 256):
        assert graph_sizes(most)[-1] == most
