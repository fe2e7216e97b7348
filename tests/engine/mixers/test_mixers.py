"""A mixer's results and states are the same to the last bit however its tokens are cut into steps and batches."""

import itertools
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.mixers.convolution import Convolution
from engine.mixers.linear_attention import LinearAttention
from engine.mixers.metadata import StateMetadata
from engine.mixers.real_gated_recurrence import RealGatedRecurrence
from engine.mixers.registry import Mixer
from engine.mixers.selective_scan import SelectiveScan
from engine.mixers.state import clear
from engine.mixers.sums import fixed_sum
from tests.engine.mixers.random_mixers import (
    CHANNELS,
    CPU,
    MIXERS,
    NUM_TOKENS,
    convolution,
    draw,
    dynamic_convolution,
    joined,
    linear_attention,
    real_gated_recurrence,
    selective_scan,
    short_convolution,
)


def run(mixers: list[Mixer], steps: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Runs each mixer as a sequence of its own, in steps of so many tokens of each; returns outputs and last states.

    Slots are in another order than sequences, and not clear.
    """
    shape = mixers[0].state_shape
    states = draw(len(mixers) + 1, *shape.sizes).to(shape.dtype)
    slots = [*reversed(range(1, len(mixers) + 1))]
    outputs: list[list[Tensor]] = [[] for _ in mixers]
    starts = [0] * len(mixers)
    for counts in steps:
        ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        running = [index for index, own in enumerate(ranges) if own]
        metadata = StateMetadata(
            [slots[index] for index in running],
            [len(ranges[index]) for index in running],
            [ranges[index].start == 0 for index in running],
            CPU,
        )
        clear(states, metadata.fresh_slots)
        mixer = joined([mixers[index] for index in running], [ranges[index] for index in running])
        parts = mixer.advance(states, metadata).split([*metadata.lengths])
        for index, part in zip(running, parts, strict=True):
            outputs[index].append(part)
        starts = [own.stop for own in ranges]
    return [(torch.cat(parts), states[slot]) for parts, slot in zip(outputs, slots, strict=True)]


def assert_equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("make", MIXERS.values(), ids=MIXERS)
def test_chunks_and_single_tokens_give_the_bits_of_the_whole(make: Callable[[int], Mixer]) -> None:
    whole = run([make(1)], [[NUM_TOKENS]])[0]
    for sizes in ([1] * NUM_TOKENS, [2, 30, 1], [20, 1, 1, 11]):
        assert_equal(run([make(1)], [[size] for size in sizes])[0], whole)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("make", MIXERS.values(), ids=MIXERS)
def test_a_batch_gives_the_bits_of_each_sequence_alone(make: Callable[[int], Mixer]) -> None:
    mixers = [make(seed) for seed in range(3)]
    alone = [run([mixer], [[NUM_TOKENS]])[0] for mixer in mixers]
    steps = [[5, 1, 0], [0, 30, 1], [28, 1, 1], [0, 1, 31]]
    for ours, theirs in zip(run(mixers, steps), alone, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("has_rate", [True, False])
@pytest.mark.parametrize("num_decays", [1, 19])
def test_linear_attention_has_the_bits_of_plain_torch(has_rate: bool, num_decays: int) -> None:
    assert_as_in_torch(linear_attention(1, has_rate, num_decays))


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_has_the_bits_of_plain_torch(dtype: torch.dtype, is_gated: bool) -> None:
    mixer = convolution(1, dtype, is_gated)
    assert_as_in_torch(mixer)
    assert_as_in_torch(mixer._replace(x=mixer.x.repeat(1, 2)[:, CHANNELS:], bias=None))
    assert_as_in_torch(mixer._replace(weight=draw(17, CHANNELS)))


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
def test_a_short_convolution_is_one_between_two_gates(dtype: torch.dtype, num_tokens: int) -> None:
    mixer = short_convolution(1, dtype).take(torch.arange(num_tokens))
    rows, metadata = mixer.rows.clone(), StateMetadata([2], [num_tokens], [False], CPU)
    states = draw(4, *mixer.state_shape.sizes, dtype=dtype)
    expected_states = states.clone()
    before, after, x = rows.chunk(3, dim=1)
    expected = Convolution(before * x, mixer.weight, mixer.bias).advance_in_torch(expected_states, metadata) * after
    assert torch.equal(mixer.advance(states, metadata), expected) and torch.equal(states, expected_states)
    assert torch.equal(mixer.rows, rows), "a step that verifies drafts reads them once more"


def test_a_dynamic_convolution_has_weights_of_all_tokens_and_of_each() -> None:
    mixer = dynamic_convolution(1)
    output, states = run([mixer], [[NUM_TOKENS]])[0]
    rows = torch.cat([torch.zeros(3, CHANNELS), mixer.x]).unfold(0, 4, 1)  # [T, channels, taps]
    weights = mixer.weight.t() + mixer.weights.transpose(1, 2).repeat_interleave(CHANNELS // 3, dim=1)
    torch.testing.assert_close(output, (rows * weights).sum(-1))
    assert torch.equal(states, mixer.x[-3:])


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("state_size", [4, 16, 21])
def test_a_selective_scan_is_that_of_plain_torch(state_size: int) -> None:
    assert_near_torch(selective_scan(1, state_size))


@pytest.mark.usefixtures("ops")
def test_a_selective_scan_that_does_not_decay_has_the_bits_of_plain_torch() -> None:
    mixer = selective_scan(1)
    mixer = mixer._replace(rates=torch.zeros_like(mixer.rates))
    assert_as_in_torch(mixer)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_gated_recurrence_is_that_of_plain_torch(dtype: torch.dtype) -> None:
    assert_near_torch(real_gated_recurrence(1, dtype))


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_gated_recurrence_of_gates_that_are_open_or_shut_has_the_bits_of_plain_torch(dtype: torch.dtype) -> None:
    mixer = real_gated_recurrence(1, dtype)
    gates = torch.where(mixer.gates > 0, 200.0, -200.0).to(dtype)
    assert_as_in_torch(mixer._replace(gates=gates, rates=torch.full_like(mixer.rates, -200.0)))


def test_a_real_gated_recurrence_keeps_the_size_of_first_inputs_alone() -> None:
    mixer = real_gated_recurrence(1)
    mixer = mixer._replace(rates=torch.zeros_like(mixer.rates))
    read = mixer.advance(torch.zeros(1, 63), StateMetadata([0], [NUM_TOKENS], [True], CPU))
    first = mixer.x[0] * torch.sigmoid(mixer.gates[0, :, 0].flatten())
    torch.testing.assert_close(read, first.expand_as(read))


def assert_near_torch(mixer: SelectiveScan | RealGatedRecurrence) -> None:
    metadata = StateMetadata([2, 0, 3], [20, 1, 12], [False] * 3, CPU)
    states = draw(4, *mixer.state_shape.sizes)
    expected = states.clone()
    torch.testing.assert_close(mixer.advance(states, metadata), mixer.advance_in_torch(expected, metadata))
    torch.testing.assert_close(states, expected)


def assert_as_in_torch(mixer: LinearAttention | Convolution | SelectiveScan | RealGatedRecurrence) -> None:
    metadata = StateMetadata([2, 0, 3], [20, 1, 12], [False] * 3, CPU)
    states = draw(4, *mixer.state_shape.sizes).to(mixer.state_shape.dtype)
    expected = states.clone()
    output = mixer.advance_in_torch(expected, metadata)
    assert torch.equal(mixer.advance(states, metadata), output) and torch.equal(states, expected)


@pytest.mark.usefixtures("ops")
def test_the_kernel_refuses_what_it_would_read_out_of_bounds() -> None:
    mixer, states = linear_attention(1), torch.zeros(4, 6, 2, 19, 16)
    for slots, lengths in (([4], [NUM_TOKENS]), ([-1], [NUM_TOKENS]), ([0], [NUM_TOKENS + 1]), ([0], [NUM_TOKENS - 1])):
        with pytest.raises(RuntimeError, match=r"out of range|follow one another"):
            mixer.advance(states, StateMetadata(slots, lengths, [True], CPU))
    with pytest.raises(RuntimeError, match="states are"):
        mixer.advance(states[..., :18, :], StateMetadata([0], [NUM_TOKENS], [True], CPU))


def test_a_convolution_is_torchs() -> None:
    mixer = convolution(1)
    expected = functional.conv1d(mixer.x.t()[None], mixer.weight.t()[:, None], mixer.bias, padding=3, groups=CHANNELS)
    output, state = run([mixer], [[NUM_TOKENS]])[0]
    torch.testing.assert_close(output, expected[0, :, :NUM_TOKENS].t())
    assert torch.equal(state, mixer.x[-3:])


def test_linear_attention_is_its_sum_over_all_earlier_tokens() -> None:
    mixer = linear_attention(1, has_rate=False)
    log_decay = mixer.decay[..., 0].log().cumsum(0)
    factors = (log_decay[:, None] - log_decay).exp()
    visible = torch.ones(NUM_TOKENS, NUM_TOKENS).tril()[..., None]
    query, key = (each.repeat_interleave(3, 1) for each in (mixer.query, mixer.key))
    weights = torch.einsum("thk,shk->tsh", query, key) * factors * visible
    torch.testing.assert_close(run([mixer], [[NUM_TOKENS]])[0][0], torch.einsum("tsh,shv->thv", weights, mixer.value))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 21])
def test_a_fixed_sum_depends_on_its_terms_alone(size: int) -> None:
    terms = draw(40, size, 11)
    whole = fixed_sum(terms, 1)
    torch.testing.assert_close(whole, terms.sum(1))
    for rows, columns in itertools.product((1, 2, 5), (1, 8)):
        assert torch.equal(fixed_sum(terms[3 : 3 + rows, :, :columns], 1), whole[3 : 3 + rows, :columns])
    assert torch.equal(fixed_sum(cast(Tensor, terms.transpose(1, 2)), -1), whole)
