"""A prefill step computes as much prompt as fits beside a decode step into the target gap, and always something."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from engine.scheduling.cost.step_cost import StepCosts
from engine.scheduling.prefill_budget import PrefillBudget, PrefillPace
from tests.engine.requests import queued

MIN_CHUNK = 16
SCORED = SamplingParams(prompt_logprobs=0)


def chunk(start: int, count: int, scores_prompt: bool = False) -> ScheduledRequest:
    return ScheduledRequest(
        request_id="",
        token_ids=range(count),
        start=start,
        block_table=(),
        params=SamplingParams(),
        prompt_token_ids=(),
        output_token_ids=(),
        samples=False,
        scores_prompt=scores_prompt,
    )


def prompt(num_tokens: int, num_computed: int = 0, params: SamplingParams | None = None) -> Request:
    request = queued("", list(range(num_tokens)), params or SamplingParams())
    request.num_computed_tokens = num_computed
    return request


def duration(batch: Batch) -> float:
    """A prefill step takes 30 ms, 5 a request, 0.5 a token and 1 if it is scored, and 0.0002 a pair of tokens; a decode
    step takes 10 ms and 4 a request."""
    if batch.phase is Phase.DECODE:
        return 0.01 + 0.004 * len(batch.requests)
    tokens = [
        (request.start + i, request.scores_prompt) for request in batch.requests for i in range(len(request.token_ids))
    ]
    seconds = sum(5e-4 + 2e-7 * (position + 1) + 1e-3 * is_scored for position, is_scored in tokens)
    return 0.03 + 0.005 * len(batch.requests) + seconds


def trained() -> StepCosts:
    costs = StepCosts()
    for repeat in range(60):
        for start in (0, 512, 4096):
            is_scored = repeat % 3 == 0
            chunks = tuple(chunk(start, 16 + 40 * ((repeat + i) % 7), is_scored) for i in range(1 + repeat % 3))
            batch = Batch(Phase.PREFILL, chunks)
            costs.observe(batch, duration(batch))
        batch = Batch(Phase.DECODE, tuple(chunk(100, 1) for _ in range(1 + repeat % 20)))
        costs.observe(batch, duration(batch))
    return costs


TRAINED = trained()


def pace(
    target_s: float, costs: StepCosts = TRAINED, max_tokens_per_gap: int = 4096, max_scored_tokens: int = 2048
) -> PrefillPace:
    return PrefillPace(
        costs,
        target_gap_s=target_s,
        max_tokens=2048,
        max_tokens_per_gap=max_tokens_per_gap,
        max_scored_tokens=max_scored_tokens,
    )


def taken(budget: PrefillBudget, requests: Sequence[Request]) -> list[int]:
    counts = []
    for request in requests:
        if budget.is_spent:
            break
        counts.append(budget.take(request))
    return counts


def allowance(
    target_s: float, num_computed: int = 0, num_decoding: int = 8, params: SamplingParams | None = None
) -> int:
    budget = pace(target_s).within_a_gap([prompt(100)] * num_decoding)
    return budget.take(prompt(num_computed + 5000, num_computed, params))


@settings(max_examples=80, deadline=None)
@given(target_s=st.floats(0.001, 2), more_s=st.floats(0, 2), start=st.integers(0, 5000))
def test_a_longer_target_never_allows_less(target_s: float, more_s: float, start: int) -> None:
    assert allowance(target_s, start) <= allowance(target_s + more_s, start)


@settings(max_examples=80, deadline=None)
@given(target_s=st.floats(0.001, 100), start=st.integers(0, 100_000), cap=st.integers(1, 3000), n=st.integers(1, 9999))
def test_something_is_always_allowed_and_never_more_than_the_limits(
    target_s: float, start: int, cap: int, n: int
) -> None:
    budget = pace(target_s, max_tokens_per_gap=cap).within_a_gap([prompt(100)] * 8)
    assert min(MIN_CHUNK, cap, n) <= budget.take(prompt(start + n, start)) <= min(cap, n, 2048)


@settings(max_examples=80, deadline=None)
@given(
    target_s=st.floats(0.2, 1),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    num_decoding=st.integers(1, 12),
)
def test_what_fits_with_the_decode_step_is_within_the_target(
    target_s: float, lengths: list[int], num_decoding: int
) -> None:
    decoding = [prompt(100)] * num_decoding
    counts = taken(pace(target_s).within_a_gap(decoding), [prompt(length) for length in lengths])
    prefill = Batch(Phase.PREFILL, tuple(chunk(0, count) for count in counts))
    decode = Batch(Phase.DECODE, tuple(chunk(100, 1) for _ in decoding))
    assert duration(prefill) + duration(decode) <= target_s * 1.02


def test_the_target_is_made_use_of() -> None:
    batch = Batch(Phase.PREFILL, (chunk(0, allowance(0.2)),))  # of a prompt so long that halves make no difference
    assert duration(batch) >= 0.88 * (0.2 - 0.042)


def test_chunks_get_shorter_as_the_prompt_gets_longer() -> None:
    counts = [allowance(0.2, start) for start in (0, 2000, 8000, 32_000)]
    assert counts == sorted(counts, reverse=True) and counts[-1] < counts[0] / 3


def test_chunks_that_are_scored_are_shorter() -> None:
    assert allowance(0.2, params=SCORED) < allowance(0.2) / 2


def test_what_a_step_scores_is_bounded_however_much_time_there_is() -> None:
    """Each scored token has logits of the whole vocabulary."""
    budget = pace(0.2, max_scored_tokens=100).while_none_decodes()
    prompts = [prompt(70, params=SCORED), prompt(200), prompt(70, params=SCORED), prompt(70, params=SCORED)]
    assert taken(budget, prompts) == [70, 200, 30, 1]
    assert taken(pace(0.2, max_scored_tokens=0).while_none_decodes(), prompts[:1]) == [1]


def test_a_prompt_computed_in_part_waits_until_more_may_be_scored() -> None:
    budget = pace(0.2, max_scored_tokens=100).while_none_decodes()
    scored, plain = prompt(200, 1, SCORED), prompt(200, 1)
    assert budget.can_continue(scored) and budget.take(scored) == 100
    assert budget.can_continue(plain) and not budget.can_continue(scored)
    assert pace(0.2, max_scored_tokens=0).while_none_decodes().can_continue(scored)


def test_what_was_scored_before_is_not_scored_again() -> None:
    resumed = prompt(5000, 0, SCORED)
    resumed.output_token_ids.append(1)
    assert pace(0.2).within_a_gap([prompt(100)] * 8).take(resumed) == allowance(0.2)


def test_the_more_decode_the_less_is_left() -> None:
    assert allowance(0.2, num_decoding=8) < allowance(0.2, num_decoding=1)


def test_requests_cost_beside_their_tokens() -> None:
    budget = pace(0.2).within_a_gap([prompt(100)] * 8)
    assert sum(taken(budget, [prompt(MIN_CHUNK)] * 100)) < allowance(0.2)


def test_where_decode_steps_are_slow_prefill_gets_twice_their_time() -> None:
    batch = Batch(Phase.PREFILL, (chunk(0, allowance(0.01, num_decoding=40)),))
    assert 0.9 * 2 * 0.17 <= duration(batch) <= 1.02 * 2 * 0.17


def test_while_none_decodes_time_is_no_limit() -> None:
    assert taken(pace(0.001).while_none_decodes(), [prompt(1500), prompt(700, 0, SCORED)]) == [1500, 548]


@pytest.mark.parametrize(
    ("target_s", "step_s"),
    [
        (0.2, 0.2),  # eight of the shortest steps would take longer
        (2.0, 8 * (0.03 + 0.005 + 16 * 5e-4)),
        (7.0, 7.0 / 16),
    ],
)
def test_where_tenants_share_a_step_is_short_but_not_much_more_than_its_tokens(target_s: float, step_s: float) -> None:
    budget = pace(target_s).while_none_decodes(is_shared=True)
    batch = Batch(Phase.PREFILL, (chunk(0, *taken(budget, [prompt(2000)])),))
    assert 0.88 * step_s <= duration(batch) <= 1.05 * step_s


def test_what_nothing_is_known_of_begins_small_and_at_most_doubles() -> None:
    costs, counts = StepCosts(), []
    decode = Batch(Phase.DECODE, (chunk(100, 1),))
    for _ in range(5):
        costs.observe(decode, duration(decode))
        counts.append(pace(10.0, costs).within_a_gap([prompt(100)]).take(prompt(3000)))
        batch = Batch(Phase.PREFILL, (chunk(0, counts[-1]),))
        costs.observe(batch, duration(batch))
    assert counts[:3] == [32, 64, 128] and counts[2] < counts[3] <= 256


def only_plain_chunks() -> StepCosts:
    costs, batch = StepCosts(), Batch(Phase.PREFILL, (chunk(0, 500),))
    for _ in range(50):
        costs.observe(batch, duration(batch))
    return costs


def test_what_was_never_scored_begins_small() -> None:
    budget = pace(10.0, only_plain_chunks()).within_a_gap([prompt(100)])
    assert budget.take(prompt(3000, params=SCORED)) == MIN_CHUNK


def test_requests_may_be_as_many_as_never_before() -> None:
    budget = pace(10.0, only_plain_chunks()).within_a_gap([prompt(100)])
    assert taken(budget, [prompt(MIN_CHUNK)] * 10) == [MIN_CHUNK] * 10


def test_a_chunk_that_is_cut_is_the_last() -> None:
    budget = pace(0.2).within_a_gap([prompt(100)] * 8)
    assert len(taken(budget, [prompt(1000), prompt(1000)])) == 1


def test_a_prompt_that_takes_two_chunks_is_halved() -> None:
    assert pace(0.2).within_a_gap([prompt(100)] * 8).take(prompt(301)) == 151


def test_no_chunk_is_tiny_whatever_it_costs() -> None:
    assert allowance(0.001, num_computed=90_000) == MIN_CHUNK
