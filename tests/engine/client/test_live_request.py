"""What becomes of the engine's updates of one request: outputs, timings, and the message for a new engine process."""

import asyncio
import gc
import time
from itertools import islice
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.client.admission import AdmissionControl, AdmissionLimits
from engine.client.live_request import LiveRequest, TimedUpdate, TokenClock
from engine.core.batch import TokenLogprobs
from engine.core.errors import EngineFailedError
from engine.core.generation_request import GenerationRequest
from engine.core.messages import FirstTokenInfo, RequestUpdate
from engine.core.outputs import RequestOutput
from engine.core.prompt_logprobs import PromptLogprobs, pack_scores
from engine.core.request import FinishReason
from engine.core.sampling_params import SamplingParams


class Letters:
    """A token table in which token 0 is `a`, token 1 is `b`, ..."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("a") + token_id])


FIRST = FirstTokenInfo(first_scheduled_s=11.0, num_cached_tokens=2, num_prefill_chunks=3)


def live_request(admission: AdmissionControl | None = None, **params: Any) -> LiveRequest:
    request = GenerationRequest(
        prompt_token_ids=[5, 6, 7], params=SamplingParams(**params), arrival_s=10.0, cache_salt="salt"
    )
    return LiveRequest(request, "r/0", Letters(), (admission or AdmissionControl(AdmissionLimits(), 1, 1)).enter(3))


def test_cached_tokens_are_the_prompts_though_more_were_given() -> None:
    live = live_request()
    live.request = msgspec.structs.replace(live.request, given_token_ids=(1, 2))
    update = TimedUpdate(RequestUpdate("r/0", token_ids=(3,), first=replace(FIRST, num_cached_tokens=4)), 12.0)
    assert outputs_of(live, update)[0].num_cached_tokens == 3


def outputs_of(live: LiveRequest, *updates: TimedUpdate) -> list[RequestOutput]:
    for update in updates:
        live.put(update)

    async def read() -> list[RequestOutput]:
        return [await live.next_output() for _ in updates]

    return asyncio.run(read())


def to_the_end(live: LiveRequest, *updates: TimedUpdate) -> list[RequestOutput]:
    for update in updates:
        live.put(update)

    async def read() -> list[RequestOutput]:
        outputs = [await live.next_output()]
        while not outputs[-1].is_finished:
            outputs.append(await live.next_output())
        return outputs

    return asyncio.run(read())


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, ())


def test_the_garbage_collector_looks_at_nothing_of_what_waits_for_a_reader() -> None:
    """Its pauses, which hold up all streams, are as long as it looks at much."""
    live, num_tokens = live_request(logprobs=5), 1000
    score = TokenLogprobs(1, -1.0, 1, tuple(range(5)), (-1.0,) * 5)
    encoded = msgspec.msgpack.encode(RequestUpdate("r/0", (1,), (score,)))
    gc.collect()
    num_before = len(gc.get_objects())
    for number in range(num_tokens):
        live.put(TimedUpdate(msgspec.msgpack.decode(encoded, type=RequestUpdate), 12.0 + number))
    for _ in range(50):
        gc.collect()  # it leaves a tuple alone once it has seen that there are but numbers in it
        num_more = len(gc.get_objects()) - num_before
        if num_more < 0.1 * num_tokens:
            return
        time.sleep(0.01)  # another thread was collecting, beside which a call does nothing
    pytest.fail(f"{num_more} objects more")


def test_scores_of_a_prompt_are_unpacked_a_slice_at_a_time_as_they_are_read() -> None:
    scores = [TokenLogprobs(i, -i / 7, i, (i, 1), (-0.5, float("-inf"))) for i in range(1000)]
    assert pack_scores([]) == []
    slices = pack_scores(scores)
    again_and_again = PromptLogprobs(slices)
    assert [*again_and_again] == [*again_and_again] == [None, *scores]
    assert len(slices) > 60
    assert next(islice(PromptLogprobs([slices[0], b"never read"]), 1, None)) == scores[0]


def test_prompt_scores_start_with_none_and_come_once() -> None:
    first = FirstTokenInfo(11.0, 0, 1, [*pack_scores([logprob(6)]), *pack_scores([logprob(7)])])
    one, two = outputs_of(
        live_request(),
        TimedUpdate(RequestUpdate("r/0", (0,), first=first), 12.0),
        TimedUpdate(RequestUpdate("r/0", (1,)), 13.0),
    )
    assert one.prompt_logprobs is not None and (*one.prompt_logprobs,) == (None, logprob(6), logprob(7))
    assert two.prompt_logprobs is None


def test_every_token_before_the_stop_keeps_its_score() -> None:
    update = RequestUpdate("r/0", (0, 1, 2), (logprob(0), logprob(1), logprob(2)), FIRST)
    one, two = to_the_end(live_request(stop=("b",)), TimedUpdate(update, 12.0))
    assert (one.token_ids, one.logprobs, one.text) == ((0,), (logprob(0),), "a")
    assert (two.token_ids, two.logprobs, two.text, two.stop_reason) == ((1,), (logprob(1),), "", "b")


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    stop=st.sampled_from([(), ("b",), ("bc",), ("abd", "d")]),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_outputs_with_scores_do_not_depend_on_the_steps(
    tokens: list[int], sizes: list[int], stop: tuple[str, ...], reason: FinishReason
) -> None:
    def outputs(sizes: list[int]) -> list[RequestOutput]:
        updates, begin = [], 0
        for size in sizes:
            ids, begin = tokens[begin : begin + size], begin + size
            is_last = begin >= len(tokens)
            update = RequestUpdate("r/0", tuple(ids), tuple(map(logprob, ids)), None if updates else FIRST)
            updates.append(
                TimedUpdate(replace(update, finish_reason=reason, stop_token_id=3) if is_last else update, 12.0)
            )
            if is_last:
                break
        return to_the_end(live_request(stop=stop, logprobs=0), *updates)

    assert outputs(sizes) == outputs([1] * len(tokens))


def test_eos_is_no_stop_reason_and_has_no_text() -> None:
    update = RequestUpdate("r/0", (0, 1), first=FIRST, finish_reason=FinishReason.STOP)
    (output,) = outputs_of(live_request(), TimedUpdate(update, 12.0))
    assert (output.text, output.token_ids, output.stop_reason) == ("a", (0, 1), None)


def test_timings_count_chunks_and_preemptions() -> None:
    end = RequestUpdate("r/0", (1,), finish_reason=FinishReason.LENGTH, num_preemptions=4)
    outputs = outputs_of(
        live_request(), TimedUpdate(RequestUpdate("r/0", (0,), first=FIRST), 12.5), TimedUpdate(end, 14.5)
    )
    timings = outputs[-1].timings
    assert timings is not None
    assert (timings.queue_s, timings.prefill_s, timings.inter_token_s) == (1.0, 1.5, (2.0,))
    assert (timings.prefill_chunks, timings.preemptions) == (3, 4)


def test_a_request_that_never_ran_has_no_timings() -> None:
    never = RequestUpdate("r/0", first=FirstTokenInfo(None, 0, 0), finish_reason=FinishReason.ABORT)
    live = live_request()
    (output,) = outputs_of(live, TimedUpdate(never, 12.0))
    assert output.timings is None and live.timings is None


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 10)), min_size=1))
def test_there_is_one_gap_fewer_than_tokens(steps: list[tuple[int, float]]) -> None:
    clock, now_s = TokenClock(10.0), 12.0
    clock.start(FIRST, now_s)
    for num_tokens, pause_s in steps:
        now_s += pause_s
        clock.add_tokens(num_tokens, now_s)
    timings = clock.timings()
    assert timings is not None
    assert len(timings.inter_token_s) == max(sum(num_tokens for num_tokens, _ in steps) - 1, 0)
    assert timings.queue_s + timings.prefill_s + timings.decode_s == timings.e2e_s


def test_a_new_engine_is_sent_what_was_asked_and_what_was_received() -> None:
    live = live_request(max_tokens=9)
    assert live.hand_over().output_token_ids == []
    outputs_of(live, TimedUpdate(RequestUpdate("r/0", (0, 1), first=FIRST), 12.0))
    live.put(TimedUpdate(RequestUpdate("r/0", (2,)), 13.0))  # and not read yet
    message = live.hand_over()
    assert (message.request_id, message.output_token_ids) == ("r/0", [0, 1, 2])
    assert (message.asked.prompt_token_ids, message.asked.arrival_s, message.asked.cache_salt) == (
        [5, 6, 7],
        10.0,
        "salt",
    )


@pytest.mark.parametrize(("ttft_limit_s", "due_s"), [(0.5, 10.5), (900.0, 910.0), (None, 70.0)])
def test_an_engine_is_told_when_the_first_token_is_wanted(ttft_limit_s: float | None, due_s: float) -> None:
    live = live_request()
    live.request = msgspec.structs.replace(live.request, ttft_limit_s=ttft_limit_s)
    assert live.hand_over().asked.due_s == due_s


def test_an_engine_is_survived_with_the_second_token_it_made() -> None:
    live, proven = live_request(max_tokens=9), []
    for update in [RequestUpdate("r/0", (0,), first=FIRST), RequestUpdate("r/0", (1,))] * 2:
        if update.first is not None:
            live.hand_over()
        live.put(TimedUpdate(update, 12.0))
        proven.append(live.is_proven)
    assert proven == [False, True, False, True]


def test_preemptions_of_all_engines_count() -> None:
    live = live_request()
    live.put(TimedUpdate(RequestUpdate("r/0", (0,), first=FIRST, num_preemptions=2), 12.0))
    live.hand_over()
    end = TimedUpdate(RequestUpdate("r/0", (1,), finish_reason=FinishReason.LENGTH, num_preemptions=3), 13.0)
    live.put(end)
    timings = [asyncio.run(live.next_output()).timings for _ in range(2)][-1]
    assert timings is not None and timings.preemptions == 5


def test_what_came_before_a_failure_is_delivered_first() -> None:
    live = live_request()
    live.hand_over()
    live.put(TimedUpdate(RequestUpdate("r/0", (0,), first=FIRST), 12.0))
    assert live.is_known_to_engine and not live.is_complete
    live.put(EngineFailedError("gone"))
    assert live.is_complete and not live.is_known_to_engine

    async def read() -> str:
        text = (await live.next_output()).text
        with pytest.raises(EngineFailedError, match="gone"):
            await live.next_output()
        return text

    assert asyncio.run(read()) == "a"


def test_its_prompt_waits_until_the_first_update() -> None:
    admission = AdmissionControl(AdmissionLimits(), 1, 1)
    live = live_request(admission)
    assert admission.stats.num_waiting_tokens == 3
    live.put(TimedUpdate(RequestUpdate("r/0", (0,), first=FIRST), 12.0))
    assert (admission.stats.num_waiting_tokens, admission.stats.num_in_flight) == (0, 1)


def test_a_reader_that_falls_behind_is_reported_until_it_has_caught_up() -> None:
    async def check() -> None:
        live, reports = live_request(), list[bool]()
        live.on_stall = lambda stalled: reports.append(stalled.is_stalled)
        times_s = (12.0, 12.5, 13.0, 13.001)
        for number, time_s in enumerate(times_s):
            assert reports == []
            live.put(TimedUpdate(RequestUpdate("r/0", (number,), first=FIRST if number == 0 else None), time_s))
        assert reports == [True] and live.hand_over().is_stalled
        for _ in times_s[1:]:
            await live.next_output()
            assert reports == [True]
        await live.next_output()
        assert reports == [True, False] and not live.hand_over().is_stalled

    asyncio.run(check())


def test_a_reader_that_waits_for_a_slow_engine_has_not_fallen_behind() -> None:
    async def check() -> None:
        live, reports = live_request(), list[bool]()
        live.on_stall = lambda stalled: reports.append(stalled.is_stalled)
        for number in range(5):
            first = FIRST if number == 0 else None
            live.put(TimedUpdate(RequestUpdate("r/0", (number,), first=first), 12.0 + 10 * number))
            await live.next_output()
        assert reports == []

    asyncio.run(check())
