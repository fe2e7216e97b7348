"""Limits of steps: what is set holds on any device; what is not, is right for the device."""

import msgspec
import pytest

from engine.core.config import EngineConfig, StepLimits
from engine.core.errors import ConfigError


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
