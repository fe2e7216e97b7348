"""Other ranks get the inputs of a forward pass as the first has them."""

from dataclasses import replace

import msgspec
import pytest
import torch

from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.ranks.messages import ForwardPass, HeadPass, RankMessage, forward_pass_of, head_pass_of
from engine.runner.head_passes import HiddenBefore
from engine.runner.model_inputs import ModelInputs, build_inputs

CPU = torch.device("cpu")


def requests(has_states: bool) -> list[ScheduledRequest]:
    def request(index: int, tokens: list[int], start: int, table: tuple[int, ...]) -> ScheduledRequest:
        slots = {"state_slot": index, "restored_slot": 7 if index else None, "saved_slot": 9} if has_states else {}
        slots |= {"num_drafts": index // 2}
        return ScheduledRequest(str(index), tokens, start, table, SamplingParams(), tokens, [], True, **slots)

    return [request(0, [5, 6, 7], 0, (3,)), request(1, [8], 9, (4, 5, 6)), request(2, [1, 2], 2, (8, 2))]


def sent(inputs: ModelInputs, kept: list[int] | None) -> ForwardPass:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(forward_pass_of(1, inputs, kept)), type=ForwardPass)


def test_other_ranks_copy_the_same_blocks() -> None:
    inputs = replace(build_inputs(requests(has_states=False), 4, CPU), block_copies=((3, 5), (7, 2)))
    assert sent(inputs, None).inputs(CPU).block_copies == ((3, 5), (7, 2))


def test_other_ranks_know_each_tokens_adapter() -> None:
    adapted = [replace(each, adapter=number) for each, number in zip(requests(False), (None, 4, 0), strict=True)]
    got = sent(build_inputs(adapted, 4, CPU), None).inputs(CPU).adapters
    assert got is not None and got.tolist() == [-1, -1, -1, 4, 0, 0] and got.dtype == torch.int64
    assert sent(build_inputs(requests(False), 4, CPU), None).inputs(CPU).adapters is None


@pytest.mark.parametrize("kept", [None, [], [0, 5]])
def test_inputs_arrive_as_they_were(kept: list[int] | None) -> None:
    inputs = build_inputs(requests(has_states=False), 4, CPU)
    message = sent(inputs, kept)
    got = message.inputs(CPU)
    assert message.index == 1 and message.kept == kept and got.states is None
    assert torch.equal(got.token_ids, inputs.token_ids) and torch.equal(got.positions, inputs.positions)
    for name, value in vars(inputs.attention).items():
        other = getattr(got.attention, name)
        assert torch.equal(other, value) and other.dtype == value.dtype if torch.is_tensor(value) else other == value


def test_states_arrive_as_they_were() -> None:
    inputs = build_inputs(requests(has_states=True), 4, CPU)
    states, got = inputs.states, sent(inputs, None).inputs(CPU).states
    assert states is not None and got is not None
    assert got.starts == states.starts and got.lengths == states.lengths and got.num_drafts == (0, 0, 1)
    for name in ("slots", "fresh_slots", "first_tokens", "restored", "saved"):
        assert torch.equal(getattr(got, name), getattr(states, name)), name


@pytest.mark.parametrize("before", [HiddenBefore((-1, 12, 13)), HiddenBefore((), (2, 0))])
def test_other_ranks_know_what_a_head_reads(before: HiddenBefore) -> None:
    inputs = build_inputs(requests(has_states=False), 4, CPU)
    data = msgspec.msgpack.encode(head_pass_of(inputs, before, [1, 3]))
    message = msgspec.msgpack.decode(data, type=RankMessage)
    assert isinstance(message, HeadPass) and message.forward_pass.kept == [1, 3]
    assert torch.equal(message.forward_pass.inputs(CPU).token_ids, inputs.token_ids)
    got = HiddenBefore(message.slots, message.rows)
    assert [*got.slots] == [*before.slots] and got.rows == (None if before.rows is None else [*before.rows])


@pytest.mark.parametrize("hidden_of", [None, (), (0, 2)])
def test_other_ranks_know_which_hidden_states_are_kept(hidden_of: tuple[int, ...] | None) -> None:
    inputs = build_inputs(requests(has_states=False), 4, CPU)
    data = msgspec.msgpack.encode(forward_pass_of(0, inputs, None, hidden_of))
    assert msgspec.msgpack.decode(data, type=ForwardPass).hidden_of == hidden_of
