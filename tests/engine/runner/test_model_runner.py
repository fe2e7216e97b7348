"""The model runner: when a step ends, what its outputs hold, and how far it has the cache prefaulted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.attention.kv_cache import KVCache
from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.errors import DeviceFailedError
from engine.core.sampling_params import SamplingParams
from engine.runner.forward import ForwardOutput
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_runner import ModelRunner


class Reads(TorchFunctionMode):
    """Counts reads of tensor values by Python, each of which waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (Tensor.item, Tensor.tolist)
        return function(*args, **(kwargs or {}))


class Logits:
    """A forward pass with given logits."""

    name = "given"

    def __init__(self, logits_of: Callable[[Any, Any], Tensor]) -> None:
        self._logits_of = logits_of

    def __call__(self, inputs: Any, kept: Any, hidden_of: Any = None) -> ForwardOutput:
        logits = self._logits_of(inputs, kept)
        return ForwardOutput(logits, torch.zeros(len(logits), 4))


def runner_of(model: LoadedModel, logits_of: Callable[[Any, Any], Tensor]) -> ModelRunner:
    return ModelRunner(model, KVCache(model.layers, 1, 16, model.dtype, model.device), Logits(logits_of))


def chunk(samples: bool, scores_prompt: bool = False) -> ScheduledRequest:
    params = SamplingParams(prompt_logprobs=0) if scores_prompt else SamplingParams()
    return ScheduledRequest("", range(5), 0, (0,), params, range(9), (), samples, scores_prompt=scores_prompt)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(False)],
        [chunk(False)] * 3,
        [chunk(False), chunk(True)],
        [chunk(False, scores_prompt=True)],
    ],
)
def test_a_prefill_step_ends_when_the_device_has_done_it(
    tiny_model: Callable[..., LoadedModel], chunks: list[ScheduledRequest]
) -> None:
    def logits_of(_: Any, kept: Any) -> Tensor:
        return torch.zeros(len(kept) or 1, 10)

    runner = runner_of(tiny_model("llama"), logits_of)
    with Reads() as reads:
        runner.prefill(Batch(Phase.PREFILL, tuple(chunks)))
    assert reads.count >= 1


@pytest.mark.parametrize(("logit", "is_finite"), [(0.0, True), (torch.nan, False), (torch.inf, False)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_possible_the_output_says_whether_logits_were_finite(
    tiny_model: Callable[..., LoadedModel], logit: float, is_finite: bool, phase: str, temperature: float
) -> None:
    def logits_of(_: Any, kept: Any) -> Tensor:
        return torch.tensor([[0.0, logit, 0.0]])

    banned = [0, 2] if logit else [0, 1, 2]
    params = SamplingParams(temperature=temperature, bad_words=tuple((token,) for token in banned))
    runner = runner_of(tiny_model("llama"), logits_of)
    request = ScheduledRequest("a", range(1), 8, (0,), params, range(9), (), True)
    [output] = getattr(runner, phase)(Batch(Phase(phase), (request,))).requests
    assert (output.token_ids, output.is_finite) == ((), is_finite)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_each_request_has_the_scores_that_it_asked_for(tiny_model: Callable[..., LoadedModel], phase: str) -> None:
    """A request may ask for no scores, for that of its token alone, or for the likeliest tokens beside it."""
    wanted = [None, 0, 2, None, 0]
    params = [SamplingParams(temperature=0.0, logprobs=each) for each in wanted]
    requests = tuple(ScheduledRequest(str(i), [1], 8, (0,), each, range(9), (), True) for i, each in enumerate(params))
    runner = runner_of(tiny_model("llama"), lambda *_: torch.eye(5)[:, :4])
    outputs = getattr(runner, phase)(Batch(Phase(phase), requests)).requests
    assert [each.token_ids for each in outputs] == [(0,), (1,), (2,), (3,), (0,)]
    assert [[len(score.top) for score in each.logprobs] for each in outputs] == [[], [0], [2], [], [0]]
    assert all(score.token_id == each.token_ids[0] for each in outputs for score in each.logprobs)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_cache_is_prefaulted_up_to_the_last_block_that_a_step_writes(
    tiny_model: Callable[..., LoadedModel], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are allocated behind those of this step's tokens do not count."""
    runner = runner_of(tiny_model("llama"), lambda *_: torch.eye(2))
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(runner._cache, "prefault", lambda *arguments: calls.append(arguments))
    params = SamplingParams()
    requests = (
        ScheduledRequest("a", [1], 16, (3, 8, 20), params, range(17), (), True),
        ScheduledRequest("b", [1], 15, (5, 30), params, range(16), (), True),
    )
    getattr(runner, phase)(Batch(Phase(phase), requests))
    assert calls == [(8, 2)]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceFailedError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),  # the step's own
        (RuntimeError("shapes differ"), RuntimeError),
    ],
)
@pytest.mark.parametrize("phase", list(Phase))
def test_only_a_cuda_error_means_that_the_device_is_lost(
    phase: Phase, error: Exception, raised: type[Exception], tiny_model: Callable[..., LoadedModel]
) -> None:
    def fail(*_: Any) -> Tensor:
        raise error

    runner = runner_of(tiny_model("llama"), fail)
    with pytest.raises(raised) as caught:
        (runner.prefill if phase is Phase.PREFILL else runner.decode)(Batch(phase, (chunk(True),)))
    assert type(caught.value) is raised and str(error) in str(caught.value)
