"""Draws by temperature, top_k, top_p and min_p: frequencies of tokens, and equality of both implementations."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import load_kernels
from engine.runner.token_draw import UNIT, Draw, draw_for, draw_in_torch, draw_weighed

LARGEST = round(1 / UNIT)
JUST_BELOW_1 = 1 - 2**-53


@pytest.fixture(params=["kernel", "torch"])
def draw(request: pytest.FixtureRequest) -> Draw:
    return kernel() if request.param == "kernel" else draw_in_torch


def kernel() -> Draw:
    if load_kernels() is None:
        pytest.skip("no kernels here")
    return draw_for(has_kernels=True)


def controls(
    numbers: Sequence[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    return torch.tensor([[temperature, number, top_k, top_p, min_p] for number in numbers], dtype=torch.float64)


def draw_rows(draw: Draw, logits: Tensor, all_controls: Tensor) -> list[int]:
    return draw(logits, logits.argmax(dim=-1), all_controls).tolist()


def drawn(draw: Draw, row: list[float], count: int = 1000, **how: Any) -> Counter[int]:
    """Counts how often each token is drawn, with evenly spaced uniform numbers."""
    numbers = [(i + 0.5) / count for i in range(count)]
    return Counter(draw_rows(draw, torch.tensor(row).expand(count, -1), controls(numbers, **how)))


def test_frequencies_are_the_softmax(draw: Draw) -> None:
    row = [0.0, 1.0, 2.0, -math.inf, -0.5]
    counts = drawn(draw, row)
    probs = torch.softmax(torch.tensor(row), 0).tolist()
    assert all(abs(counts[token] - 1000 * prob) <= 1 for token, prob in enumerate(probs)) and 3 not in counts


@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_temperature_sharpens_and_flattens(draw: Draw, temperature: float) -> None:
    share = drawn(draw, [0.0, 1.0], temperature=temperature)[1] / 1000
    assert abs(share - 1 / (1 + math.exp(-1 / temperature))) <= 0.001


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 1e-300}, {3}),
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
def test_filters_keep_exactly_their_tokens(draw: Draw, filters: dict[str, Any], kept: set[int]) -> None:
    """The probabilities are about 0.1, 0.1, 0.24 and 0.56; within the top two they are 0.3 and 0.7."""
    assert set(drawn(draw, [math.log(p) for p in (0.0999, 0.1001, 0.24, 0.56)], **filters)) == kept


def test_filtered_frequencies_are_renormalised(draw: Draw) -> None:
    counts = drawn(draw, [math.log(p) for p in (0.2, 0.2, 0.6)], top_p=0.75)
    assert counts == {0: 250, 2: 750}


@pytest.mark.parametrize(("filters", "num_kept"), [({"top_k": 70}, 70), ({"top_p": 0.05}, 50), ({"min_p": 1.0}, 1000)])
def test_of_equals_the_first_are_kept(draw: Draw, filters: dict[str, Any], num_kept: int) -> None:
    assert drawn(draw, [0.0] * 1000, count=1000, **filters).keys() == set(range(num_kept))


@pytest.mark.slow
def test_a_nucleus_may_be_most_of_the_vocabulary(draw: Draw) -> None:
    row = [-1e-6 * token_id for token_id in range(5000)]  # best first, all nearly alike
    assert max(drawn(draw, row, count=20_000, top_p=0.999)) in (4993, 4994, 4995)


def test_what_has_no_probability_does_not_come(draw: Draw) -> None:
    row = torch.tensor([[-math.inf, -30.0, 0.0, 0.0, -30.0, -math.inf]])
    for how in ({}, {"top_k": 5}, {"top_p": 0.9999999}):
        assert [draw_rows(draw, row, controls([number], **how)) for number in (0.0, 0.5, JUST_BELOW_1)] == [
            [2],
            [3],
            [3],
        ]


@pytest.mark.parametrize("largest", [math.nan, math.inf, -math.inf])
def test_nothing_is_drawn_where_no_token_is_possible(draw: Draw, largest: float) -> None:
    rows = torch.tensor([[-math.inf, largest, -math.inf], [0.0, 0.0, 9.0]])
    assert draw(rows, torch.tensor([-1, 2]), controls([0.9, 0.9], top_k=2, top_p=0.9)).tolist() == [-1, 2]


@given(seed=st.integers(0, 1000), rows=st.lists(st.integers(0, 6), min_size=1), num_threads=st.integers(1, 3))
def test_a_row_is_drawn_the_same_among_any_others(seed: int, rows: list[int], num_threads: int) -> None:
    logits = torch.randn(7, 321, generator=torch.Generator().manual_seed(seed)) * 3
    hows: list[dict[str, Any]] = [
        {},
        {"top_p": 0.8},
        {"top_k": 9},
        {"min_p": 0.1},
        {"temperature": 9},
        {"top_k": 300},
        {},
    ]
    numbers = torch.rand(7, generator=torch.Generator().manual_seed(seed)).tolist()
    each = torch.cat([controls([number], **how) for number, how in zip(numbers, hows, strict=True)])
    torch.set_num_threads(num_threads)
    for draw in (kernel(), draw_in_torch):
        alone = [draw_rows(draw, logits[row : row + 1], each[row : row + 1])[0] for row in rows]
        assert draw_rows(draw, logits[rows], each[rows]) == alone


@given(
    size=st.sampled_from([1, 2, 15, 16, 17, 64, 65, 1000, 4001]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 10.0, 1000.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    number=st.floats(0, JUST_BELOW_1),
    how=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([1e-5, 0.7, 1.0, 100.0]),
            "top_k": st.sampled_from([0, 1, 2, 20, 999, 5000]),
            "top_p": st.sampled_from([1.0, 0.9999999, 0.9, 0.5, 1e-300]),
            "min_p": st.sampled_from([0.0, 1e-9, 0.05, 1.0]),
        }
    ),
)
def test_the_kernel_draws_what_the_plain_code_draws(
    size: int, scale: float, dtype: torch.dtype, seed: int, number: float, how: dict[str, Any]
) -> None:
    draw = kernel()
    row = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    row[1::7] = -torch.inf
    wanted = controls([number], **how)
    weights = torch.ops.twostep.token_weights(row.float(), float(row.max()), how["temperature"])
    assert draw_rows(draw, row[None], wanted) == draw_weighed(weights[None], wanted[:, 1:]).tolist()


@given(
    weights=st.lists(
        st.builds(lambda a, b, c: a << 20 | b << 10 | c, *[st.sampled_from([0, 1, 2, 5, 1023])] * 3), min_size=1
    ),
    top_k=st.integers(0, 20),
    top_p=st.floats(0.01, 1.0),
)
def test_a_cut_is_found_among_weights_that_have_digits_in_common(weights: list[int], top_k: int, top_p: float) -> None:
    """The kernel searches digits of ten bits. Small weights are exact, and the others as near as float32 is."""
    draw = kernel()
    row = torch.tensor([LARGEST, *weights]).mul(UNIT).log().float()
    kernel_weights = torch.ops.twostep.token_weights(row, 0.0, 1.0)
    numbers = [(i + 0.5) / 64 for i in range(64)]
    wanted = controls(numbers, top_k=top_k, top_p=top_p)
    expected = draw_weighed(kernel_weights.repeat(64, 1), wanted[:, 1:]).tolist()
    assert draw_rows(draw, row.expand(64, -1), wanted) == expected


def test_a_cut_whose_second_digit_is_zero() -> None:
    middle = 5 << 20
    row = torch.tensor([middle + 500, middle + 100, LARGEST, 130_000, 130_000]).mul(UNIT).log()
    numbers = [(i + 0.5) / 4000 for i in range(4000)]
    assert set(draw_rows(kernel(), row.expand(4000, -1), controls(numbers, top_k=2))) == {0, 2}


@pytest.mark.parametrize("temperature", [1e-5, 0.5, 1.0, 100.0])
def test_weights_are_what_they_are_defined_as(temperature: float) -> None:
    kernel()
    row = torch.randn(1003, generator=torch.Generator().manual_seed(1)) * 5
    row[3] = -torch.inf
    weights = torch.ops.twostep.token_weights(row, float(row.max()), temperature)
    exact = torch.exp((row.double() - row.max()) / temperature) / UNIT
    assert int(weights.max()) == LARGEST and weights[3] == 0
    torch.testing.assert_close(weights.double(), exact, rtol=4e-6, atol=1)


def test_the_kernel_refuses_what_does_not_fit() -> None:
    draw, logits, likeliest, wanted = (
        kernel(),
        torch.zeros(2, 9),
        torch.zeros(2, dtype=torch.long),
        controls([0.1, 0.2]),
    )
    for wrong in (
        (logits[0], likeliest, wanted),
        (logits[:, :0], likeliest, wanted),
        (logits, likeliest[:1], wanted),
        (logits, likeliest.int(), wanted),
        (logits, likeliest + 9, wanted),
        (logits, likeliest - 2, wanted),
        (logits, likeliest, wanted[:, :4]),
        (logits, likeliest, wanted.float()),
    ):
        with pytest.raises(RuntimeError):
            draw(*wrong)
    with pytest.raises(NotImplementedError, match="Half"):
        draw(logits.half(), likeliest, wanted)


def test_rows_may_lie_anyhow_in_memory() -> None:
    logits, wanted = torch.randn(4, 50), controls([0.1, 0.4, 0.6, 0.9], top_p=0.9)
    expected = draw_rows(kernel(), logits, wanted)
    assert draw_rows(kernel(), logits.t().contiguous().t(), wanted.t().contiguous().t()) == expected
