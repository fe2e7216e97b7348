"""Limits of steps: what is set holds on any device; what is not, is right for the device."""

import msgspec
import pytest

from engine.assembly import assemble
from engine.core.batch import Batch, Phase, RequestStepOutput, StepOutput
from engine.core.config import EngineConfig, StepLimits
from engine.core.errors import ConfigError
from tests.engine.fakes import add, fake_info, run_to_end


def test_each_kind_of_device_has_defaults_of_its_own() -> None:
    config = EngineConfig(model="m")
    assert msgspec.structs.astuple(config.limits_on("cpu")) == (64, 2048, 250.0)
    assert msgspec.structs.astuple(config.limits_on("cuda")) == (256, 8192, 50.0)
    assert config.limits_on("cuda:1") == config.limits_on("cuda")


@pytest.mark.parametrize("name", StepLimits.__struct_fields__)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_set_holds_and_changes_no_other(name: str, device: str) -> None:
    limits = EngineConfig(model="m", **{name: 7}).limits_on(device)
    assert getattr(limits, name) == 7
    assert limits == msgspec.structs.replace(EngineConfig(model="m").limits_on(device), **{name: 7})


@pytest.mark.parametrize("name", StepLimits.__struct_fields__)
def test_none_is_below_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        EngineConfig(model="m", **{name: 0})


class InstantRunner:
    """Answers each request that samples with one token, and remembers the sizes of batches."""

    def __init__(self) -> None:
        self.sizes: dict[Phase, list[tuple[int, int]]] = {Phase.PREFILL: [], Phase.DECODE: []}

    def prefill(self, batch: Batch) -> StepOutput:
        self.sizes[batch.phase].append((len(batch.requests), batch.num_tokens))
        return StepOutput(tuple(RequestStepOutput(each.request_id, (1,) * each.samples) for each in batch.requests))

    decode = prefill

    def draft(self, batch: Batch) -> Batch:
        return batch


@pytest.mark.parametrize(("device", "most_requests", "most_tokens"), [("cpu", 64, 2048), ("cuda", 70, 5000)])
def test_steps_keep_the_limits_of_their_device(device: str, most_requests: int, most_tokens: int) -> None:
    info, runner = msgspec.structs.replace(fake_info(10_000, 16), device=device), InstantRunner()
    engine = assemble(EngineConfig(model="m", num_speculative_tokens=0), info, runner)
    add(engine, "long", [1] * 5000, max_tokens=1)
    run_to_end(engine)
    assert max(tokens for _, tokens in runner.sizes[Phase.PREFILL]) == most_tokens
    for number in range(70):
        add(engine, str(number), [2 + number % 40, 2 + number // 40], max_tokens=200)
    run_to_end(engine)
    assert max(count for count, _ in runner.sizes[Phase.DECODE]) == most_requests
