"""A step with draft tokens leaves the states, to the last bit, that steps of the accepted tokens alone leave."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.mixers.draft_step import DraftStep
from engine.mixers.metadata import StateMetadata
from engine.mixers.registry import Mixer
from tests.engine.mixers.random_mixers import CPU, MIXERS, NUM_TOKENS, draw, joined, mamba2_layer

SLOTS = [4, 0, 3, 1]
STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=4, max_size=4).filter(
    lambda step: any(num_drafts for num_drafts, _ in step)
)


def cut(mixer: Mixer, start: int, length: int) -> Any:
    return joined([mixer], [range(start, start + length)])


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("make", MIXERS.values(), ids=MIXERS)
@given(steps=st.lists(STEPS, min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_states_have_seen_the_accepted_tokens_and_no_others(
    make: Callable[[int], Mixer], steps: list[list[tuple[int, int]]]
) -> None:
    """Each step verifies so many draft tokens of each sequence, of which so many are accepted."""
    mixers, others = [make(seed) for seed in range(4)], [make(seed + 20) for seed in range(4)]
    shape = mixers[0].state_shape
    states = draw(6, *shape.sizes).to(shape.dtype)
    expected, starts = states.clone(), [0] * 4
    for step in steps:
        num_drafts = [num for num, _ in step]
        num_kept = [1 + min(pair) for pair in step]
        # Draft tokens that are not accepted are those of another sequence.
        parts = [
            joined([mixer, other], [range(start, start + kept), range(start, start + 1 + num - kept)])
            for mixer, other, start, kept, num in zip(mixers, others, starts, num_kept, num_drafts, strict=True)
        ]
        lengths = [1 + num for num in num_drafts]
        metadata = StateMetadata(SLOTS, lengths, [False] * 4, CPU, num_drafts=num_drafts)
        batch, draft_step = joined(parts, [*map(range, lengths)]), DraftStep(metadata)
        before = states.clone()
        outputs = draft_step.advance(batch, states).split(lengths)
        drafting = [slot for slot, num in zip(SLOTS, num_drafts, strict=True) if num]
        assert torch.equal(states[drafting], before[drafting])
        draft_step.settle(num_kept)
        for index, kept in enumerate(num_kept):
            slot = [SLOTS[index]]
            for at in range(kept):
                one = StateMetadata(slot, [1], [False], CPU)
                output = cut(mixers[index], starts[index] + at, 1).advance(expected, one)
                assert torch.equal(outputs[index][at : at + 1], output)
            starts[index] += kept
        assert torch.equal(states, expected)
        assert max(starts) < NUM_TOKENS


@pytest.mark.usefixtures("ops")
def test_states_of_one_mixer_have_seen_the_accepted_tokens_and_no_others() -> None:
    mixer = mamba2_layer(3)
    states = tuple(draw(3, *shape.sizes).to(shape.dtype) for shape in mixer.state_shapes)
    expected = tuple(each.clone() for each in states)
    draft_step = DraftStep(StateMetadata([2, 0], [4, 3], [False] * 2, CPU, num_drafts=[3, 0]))
    outputs = draft_step.advance_jointly(mixer.take(torch.arange(7)), states)
    draft_step.settle([2, 3])
    one, three, two = (StateMetadata([slot], [num], [False], CPU) for slot, num in ((2, 4), (0, 3), (2, 2)))
    ahead = tuple(each.clone() for each in expected)
    assert torch.equal(outputs[:4], cut(mixer, 0, 4).advance(ahead, one))
    assert torch.equal(outputs[4:], cut(mixer, 4, 3).advance(expected, three))
    cut(mixer, 0, 2).advance(expected, two)
    assert all(map(torch.equal, states, expected))


def test_states_of_several_mixers_are_settled_together() -> None:
    mixers = [make(3) for make in MIXERS.values()]
    metadata = StateMetadata([1, 0], [3, 1], [False] * 2, CPU, num_drafts=[2, 0])
    draft_step = DraftStep(metadata)
    states = [draw(2, *mixer.state_shape.sizes).to(mixer.state_shape.dtype) for mixer in mixers]
    expected = [each.clone() for each in states]
    for mixer, own in zip(mixers, states, strict=True):
        draft_step.advance(cut(mixer, 0, 4), own)
    draft_step.settle([2, 1])
    draft_step.settle([2, 1])  # it has ended
    for mixer, own, other in zip(mixers, states, expected, strict=True):
        cut(mixer, 0, 2).advance(other, StateMetadata([1], [2], [False], CPU))
        cut(mixer, 3, 1).advance(other, StateMetadata([0], [1], [False], CPU))
        assert torch.equal(own, other)
