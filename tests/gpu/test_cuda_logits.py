"""Masks, biases and penalties on the device are those of `adjust_row`, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.core.batch import ScheduledRequest
from engine.core.thinking_budget import ThinkingBudget
from engine.runner.adjustments import Adjustments
from engine.runner.sampler import Sampler
from engine.runner.upload import upload
from tests.engine.runner.sampled import CPU, EOS, scheduled

Adjust = Callable[[Tensor, list[ScheduledRequest]], Tensor]

VOCAB = 40  # masks have 32 bits
IDS = st.integers(0, VOCAB - 1)
SOME = st.floats(-2, 2)
PARAMS = {
    "allowed": st.frozensets(st.integers(0, 31)),
    "allowed_token_ids": st.lists(IDS, min_size=1, max_size=30).map(tuple),
    "logit_bias": st.dictionaries(IDS, st.floats(-100, 100), max_size=4),
    "bad_words": st.lists(st.lists(IDS, min_size=1, max_size=2).map(tuple), max_size=4).map(tuple),
    "min_tokens": st.integers(0, 3),
    "stop_token_ids": st.tuples(IDS),
    "ignore_eos": st.booleans(),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": SOME,
    "frequency_penalty": SOME,
    "thinking": st.builds(ThinkingBudget, max_tokens=st.integers(0, 4), end_id=IDS),
}


@st.composite
def requests_of(draw: st.DrawFn) -> ScheduledRequest:
    prompt = draw(st.lists(IDS, min_size=1, max_size=6))
    params = draw(st.fixed_dictionaries({}, optional=PARAMS))
    request = scheduled(prompt=tuple(prompt), output=tuple(draw(st.lists(IDS, max_size=6))), **params)
    return replace(request, request_id=draw(st.sampled_from("abc")))


@pytest.fixture(scope="session")
def adjust(triton_device: torch.device) -> Adjust:
    from engine.runner.cuda_sampler import adjusted

    adjustments = Adjustments(EOS)  # keeps its counts from example to example

    def adjust(logits: Tensor, requests: list[ScheduledRequest]) -> Tensor:
        step = upload(adjustments.of(requests, logits.shape[1]), triton_device)
        return adjusted(logits.to(triton_device), step).cpu() if step else logits.float()

    return adjust


def plainly_adjusted(logits: Tensor, requests: list[ScheduledRequest]) -> Tensor:
    return Sampler(CPU, has_kernels=False, eos_token_ids=EOS)._process(logits, requests)


def assert_same_bits(some: Tensor, others: Tensor) -> None:
    assert some.dtype == others.dtype == torch.float32
    assert torch.equal(some.nan_to_num(nan=1e30).view(torch.int32), others.nan_to_num(nan=1e30).view(torch.int32))
    assert torch.equal(some.isnan(), others.isnan())


@settings(max_examples=60)
@given(
    requests=st.lists(requests_of(), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    odd=st.sampled_from([0.0, -0.0, torch.nan, torch.inf, -torch.inf]),
    place=IDS,
)
def test_rows_are_adjusted_as_the_plain_code_does(
    adjust: Adjust, requests: list[ScheduledRequest], seed: int, dtype: torch.dtype, odd: float, place: int
) -> None:
    logits = (torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5).to(dtype)
    logits[:, place] = odd
    before = logits.clone()
    assert_same_bits(adjust(logits, requests), plainly_adjusted(logits, requests))
    assert_same_bits(logits.float(), before.float())


@pytest.mark.parametrize(("size", "extra"), [(7, 0), (4096, 0), (4097, -1), (10_001, 2)])
def test_vocabularies_and_masks_may_have_any_size(adjust: Adjust, size: int, extra: int) -> None:
    last = size - 1
    mask = bytes([0b1010_1010] * (-(-size // 8) + extra))
    hows: list[dict[str, Any]] = [
        {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.7,
            "prompt": tuple(range(0, size, 3)),
            "output": (last, last),
        },
        {},
        {"logit_bias": {last: 1.0, 0: -2.0}},
        {"thinking": ThinkingBudget(max_tokens=0, end_id=last)},
        {"allowed_token_ids": (last, 1)},
    ]
    requests = [replace(scheduled(**how), request_id=str(row)) for row, how in enumerate(hows)]
    requests.append(replace(requests[0], request_id="masked", allowed_tokens=(mask,)))
    requests.append(replace(requests[3], request_id="forced against its grammar", allowed_tokens=(bytes(len(mask)),)))
    logits = torch.randn(len(requests), size, generator=torch.Generator().manual_seed(size))
    assert_same_bits(adjust(logits, requests), plainly_adjusted(logits, requests))


@pytest.mark.parametrize(
    "how",
    [
        {"bad_words": ((1,), (2,), (4,))},  # of NaN, of infinity and of a number
        {"presence_penalty": -0.4, "frequency_penalty": 1.1, "output": (0, 0, 3)},
        {"thinking": ThinkingBudget(max_tokens=0, end_id=3), "logit_bias": {3: 1.0}, "bad_words": ((3,),)},
        # The mark came before the thinking began.
        {"thinking": ThinkingBudget(max_tokens=0, end_id=3, start_id=5), "output": (3, 5), "presence_penalty": 1.0},
    ],
    ids=["banned", "amounts in float32", "forced with a bias", "forced with a penalty"],
)
def test_these_are_as_in_the_plain_code_too(adjust: Adjust, how: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, torch.nan, torch.inf, 4.0, 2.0, 1.0]])
    requests = [replace(scheduled(**{"prompt": (1,), **how}), request_id=str(how))]
    assert_same_bits(adjust(logits, requests), plainly_adjusted(logits, requests))


def test_a_forced_token_without_a_logit_is_not_forced(adjust: Adjust) -> None:
    how = {"thinking": ThinkingBudget(max_tokens=0, end_id=2), "logit_bias": {1: 1.0}, "presence_penalty": 1.0}
    requests = [scheduled(prompt=(1,), **how)] * 2
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, -torch.inf]])
    expected = torch.tensor([[-torch.inf, -torch.inf, 0.0], [1.0, 3.0, -torch.inf]])
    assert_same_bits(adjust(logits, requests), expected)
    assert_same_bits(plainly_adjusted(logits, requests), expected)
