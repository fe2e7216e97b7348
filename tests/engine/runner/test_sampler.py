"""Which token is sampled, and how a request's parameters change its logits before that."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import load_kernels
from engine.runner.logits_processors import adjusts_logits
from engine.runner.philox import philox4x32, uniforms
from engine.runner.sampler import argmax_for, argmax_in_numpy
from tests.engine.runner.sampled import CPU, adjusted, draw, scheduled


def words(value: int) -> Any:
    return np.full(1, value, dtype=np.uint64)


def test_philox_gives_the_published_numbers() -> None:
    """The expected words are known answers of Random123's kat_vectors."""
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


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_rows_that_are_not_finite_or_all_banned_have_no_token(filters: dict[str, Any]) -> None:
    logits = torch.zeros(4, 5)
    logits[0, 1], logits[1, 2], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    assert [token is None for token in draw(logits, [scheduled(**filters)] * 4)] == [True, True, False, True]


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


def test_a_top_p_of_zero_keeps_the_likeliest() -> None:
    logits = torch.tensor([1.0, 1.2, 1.1]).expand(60, -1)
    assert set(draw(logits, [scheduled(position=end, top_p=0.0) for end in range(60)])) == {1}
