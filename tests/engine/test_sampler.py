import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ScheduledRequest
from engine.kernels import load_kernels
from engine.logits import adjust_row, adjusts_logits
from engine.philox import philox4x32, uniforms
from engine.sampler import NUM_CANDIDATES, _invert, argmax_for, argmax_in_numpy, sample, score
from engine.sampling_params import SamplingParams

EOS = (0,)
CPU = torch.device("cpu")


def scheduled(
    position: int = 5,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    allowed: Sequence[int] | None = None,
    **params: Any,
) -> Any:
    return ScheduledRequest(
        request_id="r",
        token_ids=(1,),
        start=position - 1,
        block_table=(),
        params=SamplingParams(**params),
        prompt_token_ids=prompt,
        output_token_ids=output,
        samples=True,
        allowed_tokens=() if allowed is None else (sum(1 << token_id for token_id in allowed).to_bytes(4, "little"),),
    )


def draw(logits: torch.Tensor, requests: list[ScheduledRequest]) -> list[int | None]:
    return sample(logits, requests, EOS, argmax_in_numpy)


def draw_many(row: list[float], count: int = 4000, **params: Any) -> Counter[int | None]:
    requests = [scheduled(position=position + 1, **params) for position in range(count)]
    return Counter(draw(torch.tensor(row).expand(count, -1), requests))


def adjusted(row: list[float], **fields: Any) -> list[float]:
    logits = torch.tensor(row)
    adjust_row(logits, scheduled(**fields), EOS)
    return logits.tolist()


def words(value: int) -> Any:
    return np.full(1, value, dtype=np.uint64)


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of Random123's kat_vectors."""
    zero, ones = words(0), words(0xFFFFFFFF)
    assert [int(w[0]) for w in philox4x32((zero,) * 4, (zero,) * 2)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w[0]) for w in philox4x32((ones,) * 4, (ones,) * 2)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=8))
def test_a_draw_is_a_function_of_its_seed_and_position_alone(pairs: list[tuple[int, int]]) -> None:
    together = uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    assert all(0.0 <= number < 1.0 for number in together)
    assert together.tolist() == [uniforms([seed], [position])[0] for seed, position in pairs]


def test_draws_are_uniform() -> None:
    numbers = uniforms([1] * 20_000, list(range(20_000)))
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert counts.min() > 800 and counts.max() < 1200


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert draw(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), [scheduled(temperature=0.0)] * 2) == [1, 0]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"min_p": 0.1}, {"logit_bias": {3: 2.0}}], ids=str)
def test_logits_are_left_as_they_are(params: dict[str, Any]) -> None:
    logits = torch.randn(2, 9)
    before = logits.clone()
    draw(logits, [scheduled(**params), scheduled(temperature=0.0)])
    assert torch.equal(logits, before)


def test_the_likeliest_is_taken_only_where_nothing_else_is_asked_for() -> None:
    for params in ({"allowed": [1]}, {"logit_bias": {1: 99.0}}):
        assert draw(
            torch.tensor([[1.0, 0.0, 2.0]] * 2), [scheduled(temperature=0.0), scheduled(temperature=0.0, **params)]
        ) == [2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 1000])
def test_the_kernel_finds_what_numpy_finds(size: int, dtype: torch.dtype) -> None:
    if load_kernels() is None:
        pytest.skip("no kernels here")
    logits = torch.randn(40, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    logits[3:9] = logits[3:9].round()  # equals
    logits[5], logits[6] = -torch.inf, torch.inf
    logits[7, size // 2] = torch.nan
    logits[8, -1] = torch.nan
    logits[9, size // 3] = -torch.inf
    logits[10:20] = -logits[10:20].abs() - 1
    assert argmax_for(CPU, True)(logits).tolist() == argmax_in_numpy(logits).tolist()
    turned = logits.t().contiguous().t()
    assert argmax_for(CPU, True)(turned).tolist() == argmax_in_numpy(logits).tolist()


def test_frequencies_follow_the_softmax() -> None:
    row = [0.0, 1.0, 2.0, -torch.inf]
    counts = draw_many(row)
    probs = torch.softmax(torch.tensor(row), 0).tolist()
    assert all(abs(counts[token] / 4000 - probs[token]) < 0.03 for token in range(4))
    assert counts[3] == 0


def test_temperature_sharpens_and_flattens() -> None:
    row = [0.0, 1.0]
    cold, warm = (draw_many(row, temperature=t)[1] / 4000 for t in (0.25, 4.0))
    assert abs(cold - 1 / (1 + math.exp(-4))) < 0.02 and abs(warm - 1 / (1 + math.exp(-0.25))) < 0.03


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.7}, {2, 3}),
        ({"top_p": 0.89}, {1, 2, 3}),
        ({"min_p": 0.3}, {2, 3}),
        ({"min_p": 1.0}, {3}),
        ({"top_k": 2, "top_p": 0.72}, {2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {3}),
        ({"top_k": 3, "min_p": 0.3}, {2, 3}),
    ],
)
def test_filters_keep_exactly_their_tokens(filters: dict[str, Any], kept: set[int]) -> None:
    """Probabilities 0.1, 0.1, 0.24, 0.56 (about); within the top two they are 0.3 and 0.7."""
    row = [math.log(p) for p in (0.0999, 0.1001, 0.24, 0.56)]
    assert set(draw_many(row, **filters)) == kept


def test_filtered_frequencies_are_renormalised() -> None:
    counts = draw_many([math.log(p) for p in (0.2, 0.2, 0.6)], top_k=0, top_p=0.75)
    assert set(counts) == {0, 2} or set(counts) == {1, 2}
    assert abs(counts[2] / 4000 - 0.75) < 0.03


def test_a_wide_nucleus_looks_beyond_the_first_candidates() -> None:
    row = [-1e-6 * token_id for token_id in range(3 * NUM_CANDIDATES)]  # best first, all nearly alike
    counts = draw_many(row, count=300, top_p=0.999)
    assert sum(count for token_id, count in counts.items() if token_id >= NUM_CANDIDATES) > 150


def test_no_draw_takes_a_token_of_probability_zero() -> None:
    cdf = torch.tensor([[0.0, 0.5, 0.5, 1.0, 1.0]] * 3)
    assert _invert(cdf, torch.tensor([0.0, 0.5, 1.0 - 2**-53], dtype=torch.float64)).tolist() == [1, 3, 3]


@given(seed=st.integers(0, 1000), neighbours=st.integers(0, 5), row=st.integers(0, 5))
def test_a_row_is_sampled_the_same_among_any_others(seed: int, neighbours: int, row: int) -> None:
    logits = torch.randn(7, 321, generator=torch.Generator().manual_seed(seed)) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.8},
        {"top_k": 9},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"top_k": 300},
    ]
    requests = [scheduled(position=7 + index, **{"seed": seed, **kinds[index]}) for index in range(6)]
    alone = draw(logits[row : row + 1], [requests[row]])
    rows = [*range(neighbours), row]
    assert draw(logits[rows], [requests[index] for index in rows])[-1:] == alone


def test_rows_of_nan_or_all_banned_have_no_token() -> None:
    logits = torch.stack([torch.full((5,), torch.nan), torch.full((5,), -torch.inf)])
    for filters in ({}, {"top_p": 0.5}, {"temperature": 0.0}):
        assert draw(logits, [scheduled(**filters)] * 2) == [None, None]


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.9}])
def test_only_what_the_grammar_allows_can_come(how: dict[str, Any]) -> None:
    logits = torch.tensor([9.0, 1.0, 8.0, 1.0, 9.0]).expand(60, -1)
    chosen = draw(logits, [scheduled(position=end + 1, allowed=[1, 3], **how) for end in range(60)])
    assert set(chosen) <= {1, 3}


def test_a_grammar_is_its_own_rows_only() -> None:
    requests = [scheduled(temperature=0.0), scheduled(temperature=0.0, allowed=[2]), scheduled(temperature=0.0)]
    assert draw(torch.tensor([1.0, 9.0, 2.0]).expand(3, -1), requests) == [1, 2, 1]


def test_tokens_beyond_the_mask_are_not_allowed() -> None:
    logits = torch.arange(40.0)[None]  # the mask has 32 bits
    assert draw(logits, [scheduled(temperature=0.0, allowed=[3, 31])]) == [31]
    assert draw(logits, [scheduled(temperature=0.0, allowed=[])]) == [None]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (2,)},
        {"bad_words": ((0,), (1,))},
        {"min_tokens": 1, "stop_token_ids": (0, 1)},
        {"logit_bias": {2: 100.0}, "allowed_token_ids": (2, 3)},
    ],
)
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_p": 0.5}])
def test_when_all_is_forbidden_nothing_comes(fields: dict[str, Any], how: dict[str, Any]) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert draw(logits, [scheduled(allowed=[0, 1], **fields, **how)]) == [None]


def test_no_bias_and_no_penalty_brings_back_what_is_forbidden() -> None:
    params: dict[str, Any] = {"logit_bias": {1: 100.0}, "repetition_penalty": 0.01, "presence_penalty": -2.0}
    request = scheduled(allowed=[0], output=(1, 2), **params)
    assert draw(torch.tensor([[-5.0, 5.0, 5.0]]), [request]) == [0]


def test_logit_bias_is_added() -> None:
    assert adjusted([1.0, 2.0, 3.0], logit_bias={0: 5.0, 2: -1.0}) == [6.0, 2.0, 2.0]


def test_only_allowed_tokens_can_come() -> None:
    assert adjusted([1.0, 2.0, 3.0], allowed_token_ids=(1,)) == [-torch.inf, 2.0, -torch.inf]


@pytest.mark.parametrize(("num_outputs", "banned"), [(0, True), (1, True), (2, False)])
def test_stops_are_banned_until_min_tokens(num_outputs: int, banned: bool) -> None:
    row = adjusted([1.0, 2.0, 3.0], min_tokens=2, stop_token_ids=(2,), output=(1,) * num_outputs)
    assert (row[0] == -torch.inf, row[2] == -torch.inf) == (banned, banned)
    assert row[1] == 2.0


def test_a_bad_word_cannot_be_finished_even_across_the_prompt() -> None:
    words_ = {"bad_words": ((1, 2), (0,), (2, 1, 1))}
    assert adjusted([1.0, 1.0, 1.0], **words_, prompt=(2, 1)) == [-torch.inf, -torch.inf, -torch.inf]
    assert adjusted([1.0, 1.0, 1.0], **words_, prompt=(2,), output=(2,)) == [-torch.inf, 1.0, 1.0]


def test_repetition_penalty_counts_prompt_and_output_once() -> None:
    row = adjusted([2.0, -2.0, 2.0, 2.0], repetition_penalty=2.0, prompt=(0, 0), output=(1, 0))
    assert row == [1.0, -4.0, 2.0, 2.0]


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    row = adjusted([0.0, 0.0, 0.0], presence_penalty=0.5, frequency_penalty=0.25, prompt=(2,), output=(0, 0, 1))
    assert row == [-1.0, -0.75, 0.0]


def test_plain_requests_are_not_adjusted() -> None:
    assert not adjusts_logits(scheduled(temperature=0.7, top_p=0.9))
    assert adjusts_logits(scheduled(min_tokens=1)) and not adjusts_logits(scheduled(min_tokens=1, output=(4,)))


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 200])
def test_many_rows_have_the_scores_that_each_has_alone(num_rows: int) -> None:
    logits = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(num_rows))
    token_ids = [7 * row % 300 for row in range(num_rows)]
    alone = [score(logits[row : row + 1], [token_id], 3)[0] for row, token_id in enumerate(token_ids)]
    assert list(score(logits, token_ids, 3)) == alone


def test_scores_are_the_log_softmax_with_rank_and_top() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0], [5.0, 5.0, 0.0]])
    first, second = score(logits, [1, 0], 2)
    expected = torch.log_softmax(logits, -1)
    assert (first.token_id, first.rank, second.rank) == (1, 2, 1)
    assert first.logprob == expected[0, 1].item()
    assert [token for token, _ in first.top] == [2, 1] and first.top[0][1] == expected[0, 2].item()
    assert score(logits, [1, 0], 0)[0].top == ()
