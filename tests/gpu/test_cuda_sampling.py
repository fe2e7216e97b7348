"""Draws on the device equal the plain ones token for token, whatever else is in the batch, and wait for nothing."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.core.batch import ScheduledRequest
from engine.runner.cuda_scorer import CudaScorer
from engine.runner.logprobs import Scorer
from engine.runner.sampler import Sampler, argmax_in_numpy
from engine.runner.sampler_choice import choose_sampler, choose_scorer
from engine.runner.token_draw import UNIT, draw_weighed
from tests.engine.runner.sampled import CPU, EOS, scheduled
from tests.gpu.cross_compile import CAPABILITIES, assert_fit, compiled
from tests.gpu.host_waits import HostWaits

LARGEST = round(1 / UNIT)
JUST_BELOW_1 = 1 - 2**-53
SIZES = [1, 7, 4096, 4097, 9000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FILTERS = {
    "number": st.sampled_from([0.0, 0.5, JUST_BELOW_1]) | st.floats(0, JUST_BELOW_1),
    "top_k": st.sampled_from([0, 1, 2, 20, 999, 4096, 300_000]),
    "top_p": st.sampled_from([1.0, JUST_BELOW_1, 0.9, 0.5, 0.01, 1e-300]),
    "min_p": st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
}


@pytest.fixture(scope="session")
def kernels(triton_device: torch.device) -> ModuleType:
    from engine.kernels.cuda import sampling

    return sampling


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def controls_row(
    number: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    return [temperature, number, top_k, top_p, min_p]


def drawn_on(
    kernels: ModuleType, device: torch.device, weights: Tensor, controls: Tensor, likeliest: Tensor | None = None
) -> list[int]:
    """Returns what the device draws by these weights [num_rows, vocab]."""
    likeliest = weights.argmax(dim=1) if likeliest is None else likeliest
    return kernels.draw(
        weights.int().to(device),
        likeliest.to(device),
        controls.to(device),
        has_top_k=bool((controls[:, 2] > 0).any()),
        has_top_p=bool((controls[:, 3] < 1).any()),
    ).tolist()


def weights_of(kind: str, size: int, seed: int) -> Tensor:
    """Returns weights [size] of which one is the largest possible."""
    if kind == "equal":
        weights = torch.full((size,), LARGEST)
    elif kind == "digits":  # many have two of their three digits in common
        digits = torch.tensor([0, 1, 5, 1022, 1023])[torch.randint(5, (3, size), generator=generator(seed))]
        weights = (digits[0] << 20) + (digits[1] << 10) + digits[2] + 1
    elif kind == "tiny":
        weights = torch.randint(0, 3, (size,), generator=generator(seed))
    else:
        weights = (torch.rand(size, generator=generator(seed)) ** 20 / UNIT).long()
    weights[seed % size] = LARGEST
    return weights


class TestArgmax:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", SIZES)
    def test_it_is_numpys(
        self, kernels: ModuleType, triton_device: torch.device, size: int, dtype: torch.dtype
    ) -> None:
        logits = torch.randn(12, size, generator=generator(size)).to(dtype)
        logits[3:5] = logits[3:5].round()  # equals
        logits[5], logits[6] = -torch.inf, torch.inf
        logits[7, size // 2] = torch.nan
        logits[8, -1], logits[8, 0] = torch.nan, torch.inf
        logits[9, size // 3] = -torch.inf
        logits[10] = 0
        logits[11] = -logits[11].abs() - 1
        assert kernels.argmax(logits.to(triton_device)).tolist() == argmax_in_numpy(logits).tolist()

    def test_rows_may_lie_apart_and_may_be_none(self, kernels: ModuleType, triton_device: torch.device) -> None:
        logits = torch.randn(9, 5000, generator=generator(1)).to(triton_device)
        assert kernels.argmax(logits[::4, :4500]).tolist() == logits[::4, :4500].argmax(dim=1).tolist()
        assert kernels.argmax(logits[:0]).tolist() == []


class TestWeights:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("temperature", [1e-5, 0.5, 1.0, 100.0])
    def test_they_are_what_they_are_defined_as(
        self, kernels: ModuleType, triton_device: torch.device, temperature: float, dtype: torch.dtype
    ) -> None:
        row = (torch.randn(5003, generator=generator(1)) * 5).to(dtype)
        row[3] = -torch.inf
        controls = torch.tensor([controls_row(0.0, temperature)], dtype=torch.float64)
        logits = row[None].to(triton_device)
        weights = kernels.weigh(logits, kernels.argmax(logits), controls.to(triton_device)).cpu()[0]
        exact = torch.exp((row.double() - row.max()) / temperature) / UNIT
        assert int(weights.max()) == LARGEST and weights[3] == 0
        torch.testing.assert_close(weights.double(), exact, rtol=4e-6, atol=1)


class TestDraw:
    @pytest.mark.slow
    @settings(max_examples=25)
    @given(
        size=st.sampled_from(SIZES),
        kind=st.sampled_from(["equal", "digits", "tiny", "random"]),
        seed=st.integers(0, 1000),
        hows=st.lists(st.fixed_dictionaries(FILTERS), min_size=1, max_size=2),
    )
    def test_it_is_the_plain_one_by_the_same_weights(
        self,
        kernels: ModuleType,
        triton_device: torch.device,
        size: int,
        kind: str,
        seed: int,
        hows: list[dict[str, Any]],
    ) -> None:
        weights = torch.stack([weights_of(kind, size, seed + row) for row in range(len(hows))])
        controls = torch.tensor([controls_row(**how) for how in hows], dtype=torch.float64)
        expected = draw_weighed(weights.clone(), controls[:, 1:]).tolist()
        assert drawn_on(kernels, triton_device, weights, controls) == expected
        assert drawn_on(kernels, triton_device, weights[-1:], controls[-1:]) == expected[-1:]

    @pytest.mark.slow
    @pytest.mark.parametrize("how", [{}, {"top_k": 50}, {"top_p": 0.95}, {"top_k": 1000, "top_p": 0.5, "min_p": 1e-7}])
    @pytest.mark.parametrize("size", [32_000, 151_936])
    def test_vocabularies_may_be_large(
        self, kernels: ModuleType, triton_device: torch.device, size: int, how: dict[str, Any]
    ) -> None:
        weights = torch.stack([weights_of(kind, size, 77) for kind in ("random", "digits")])
        controls = torch.tensor([controls_row(number, **how) for number in (0.3, JUST_BELOW_1)], dtype=torch.float64)
        expected = draw_weighed(weights.clone(), controls[:, 1:]).tolist()
        assert drawn_on(kernels, triton_device, weights, controls) == expected

    @pytest.mark.parametrize("how", [{"top_k": 70}, {"top_p": 0.007}])
    def test_of_equals_the_first_are_kept(
        self, kernels: ModuleType, triton_device: torch.device, how: dict[str, Any]
    ) -> None:
        weights = torch.full((1, 10_000), 3)
        weights[0, 9000] = LARGEST
        controls = torch.tensor([controls_row(JUST_BELOW_1, **how, temperature=1.0)], dtype=torch.float64)
        assert drawn_on(kernels, triton_device, weights, controls) == [9000]
        weights[0, 9000] = 3
        assert drawn_on(kernels, triton_device, weights, controls) == [69]

    def test_min_p_keeps_all_that_are_as_likely_as_its_limit(
        self, kernels: ModuleType, triton_device: torch.device
    ) -> None:
        weights = torch.tensor([[9, 9, LARGEST, *[LARGEST // 2] * 5]])
        controls = torch.tensor([controls_row(JUST_BELOW_1, top_k=7, min_p=0.5)], dtype=torch.float64)
        assert drawn_on(kernels, triton_device, weights, controls) == [7]

    def test_rows_have_filters_of_their_own(self, kernels: ModuleType, triton_device: torch.device) -> None:
        hows: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.5}, {}, {"top_k": 99, "top_p": 0.9}, {"min_p": 0.3}]
        weights = torch.tensor([[0, *[LARGEST // n for n in range(1, 11)]]] * len(hows))
        controls = torch.tensor([controls_row(JUST_BELOW_1, **how) for how in hows], dtype=torch.float64)
        assert drawn_on(kernels, triton_device, weights, controls) == [2, 2, 10, 8, 3]
        assert draw_weighed(weights.clone(), controls[:, 1:]).tolist() == [2, 2, 10, 8, 3]

    def test_rows_without_a_token_and_greedy_ones_are_left(
        self, kernels: ModuleType, triton_device: torch.device
    ) -> None:
        weights = torch.full((3, 9), LARGEST)
        controls = torch.tensor([controls_row(0.9, top_k=5, top_p=0.9)] * 3, dtype=torch.float64)
        controls[1, 0] = 0.0
        likeliest = torch.tensor([-1, 7, 0])
        assert drawn_on(kernels, triton_device, weights, controls, likeliest) == [-1, 7, 4]
        assert drawn_on(kernels, triton_device, weights[:0], controls[:0]) == []


HOWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.8},
    {"top_k": 9, "temperature": 0.7},
    {"min_p": 0.1},
    {"top_k": 300, "top_p": 0.5},
    {"top_p": 0.0},
    {"allowed": [1, 3, 17]},
    {"allowed": []},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "prompt": (1, 2, 2), "output": (5, 5, 6)},
    {"logit_bias": {3: 2.0, 300: -5.0}, "temperature": 0.0},
    {"min_tokens": 3, "bad_words": ((7,),), "top_p": 0.9},
]


def plain_by_weights_of(kernels: ModuleType, device: torch.device) -> Sampler:
    """Returns the plain sampler, which draws by the weights that the device computes."""

    def draw(logits: Tensor, likeliest: Tensor, controls: Tensor) -> Tensor:
        weights = kernels.weigh(*(x.to(device) for x in (logits, likeliest, controls))).cpu().long()
        return torch.where(likeliest < 0, likeliest, draw_weighed(weights, controls[:, 1:]))

    sampler = Sampler(CPU, has_kernels=False, eos_token_ids=EOS)
    sampler._draw = draw
    return sampler


@pytest.fixture(scope="session")
def sampler(triton_device: torch.device) -> Sampler:
    from engine.runner.cuda_sampler import CudaSampler

    return CudaSampler(triton_device, EOS)


class TestSampler:
    def test_it_is_the_one_for_cuda(self, sampler: Sampler) -> None:
        assert type(choose_sampler(torch.device("cuda"), False, EOS)) is type(sampler)
        assert type(choose_sampler(CPU, False, EOS)) is Sampler

    @pytest.mark.slow
    @settings(max_examples=25)
    @given(seed=st.integers(0, 1000), numbers=st.lists(st.integers(0, len(HOWS) - 1), max_size=6))
    def test_it_samples_what_the_plain_one_samples(
        self, sampler: Sampler, kernels: ModuleType, triton_device: torch.device, seed: int, numbers: list[int]
    ) -> None:
        logits = (torch.randn(len(numbers), 400, generator=generator(seed)) * 3).bfloat16()
        requests = [scheduled(position=7 + index, seed=seed, **HOWS[number]) for index, number in enumerate(numbers)]
        before = logits.clone()
        expected = plain_by_weights_of(kernels, triton_device).sample(logits, requests)
        logits = logits.to(triton_device)
        assert sampler.sample(logits, requests) == expected
        assert torch.equal(logits.cpu(), before)

    @pytest.mark.slow
    def test_a_row_is_sampled_the_same_among_any_others(self, sampler: Sampler, triton_device: torch.device) -> None:
        logits = (torch.randn(len(HOWS), 5000, generator=generator(3)) * 3).bfloat16().to(triton_device)
        requests = [scheduled(position=7 + row, seed=row, **how) for row, how in enumerate(HOWS)]
        alone = [sampler.sample(logits[row : row + 1], [request])[0] for row, request in enumerate(requests)]
        assert sampler.sample(logits, requests) == alone
        assert sampler.sample(logits.flip(0), requests[::-1]) == alone[::-1]

    @pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}], ids=str)
    def test_rows_that_are_not_finite_have_no_token(
        self, sampler: Sampler, triton_device: torch.device, how: dict[str, Any]
    ) -> None:
        logits = torch.zeros(4, 5)
        logits[0, 1], logits[1, 2], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf, -math.inf
        tokens = sampler.sample(logits.to(triton_device), [scheduled(**how)] * 4)
        assert [token is None for token in tokens] == [True, True, False, True]

    @pytest.mark.parametrize("hows", [HOWS[:1], HOWS[:2], HOWS[:7], HOWS])
    def test_a_step_goes_to_the_device_once_and_comes_back_once(
        self, sampler: Sampler, triton_device: torch.device, hows: Sequence[dict[str, Any]]
    ) -> None:
        requests: list[ScheduledRequest] = [scheduled(position=7 + row, **how) for row, how in enumerate(hows)]
        logits = torch.randn(len(requests), 400, device=triton_device)
        with HostWaits() as waits:
            sampler.sample(logits, requests)
        assert waits.seen == ["to", "tolist"]


class TestScorer:
    def test_it_is_the_one_for_cuda(self) -> None:
        assert type(choose_scorer(torch.device("cuda"), False)) is CudaScorer
        assert type(choose_scorer(CPU, False)) is Scorer

    @pytest.mark.parametrize("size", [7, 50_257, 151_936])
    def test_a_row_has_the_same_scores_among_any_others(self, triton_device: torch.device, size: int) -> None:
        logits = (torch.randn(9, size, generator=generator(size)) * 3).bfloat16()
        plain = {row: CudaScorer().score_rows(logits, [(row, row % 7, row)])[row] for row in range(1, 9, 2)}
        logits = logits.to(triton_device)
        alone = {row: CudaScorer().score(logits[row : row + 1], [row % 7], row)[0] for row in range(1, 9, 2)}
        together = CudaScorer().score_rows(logits, [(row, row % 7, row) for row in range(1, 9, 2)])
        assert together == alone
        for row, scores in plain.items():
            assert alone[row].rank == scores.rank and [i for i, _ in alone[row].top] == [i for i, _ in scores.top]
            assert alone[row].logprob == pytest.approx(scores.logprob, abs=1e-5)

    def test_they_go_to_the_device_once_and_come_back_once(self, triton_device: torch.device) -> None:
        logits = torch.randn(200, 40, device=triton_device)
        with HostWaits() as waits:
            CudaScorer().score_rows(logits, [(row, 3, row % 3) for row in range(200)])
        assert waits.seen == ["to", "tolist"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_fit_into_every_gpu(capability: int) -> None:
    usages = compiled("tests.gpu.sampling_launches:launch_all", (capability,))
    assert_fit(usages)
    assert len({usage.kernel for usage in usages}) == 10
