"""Where there is a GPU and a torch without CUDA, a sentence says what to install; elsewhere nothing is said."""

import logging
from pathlib import Path

import pytest
import torch

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.host import nvidia
from engine.model.loader import load_model
from engine.model.setup import load_model_runner
from tests.engine.tiny_models import make_checkpoint

COMMAND = "-m pip install --force-reinstall --index-url https://download.pytorch.org/whl/cu130 torch==2.13.0."


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, and torch without CUDA."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(nvidia, "_DRIVER", tmp_path / "nvidiactl")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")


@pytest.mark.usefixtures("gpu")
def test_the_command_is_ready_to_paste() -> None:
    assert (nvidia.cuda_build_advice() or "").endswith(COMMAND)


@pytest.mark.usefixtures("gpu")
def test_nothing_is_said_without_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert nvidia.cuda_build_advice() is None
    monkeypatch.setattr(torch.version, "cuda", None)
    (tmp_path / "nvidiactl").unlink()
    assert nvidia.cuda_build_advice() is None


@pytest.mark.usefixtures("gpu")
def test_it_is_told_where_the_cpu_stands_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(make_checkpoint("llama", tmp_path))
    for device, is_told in (("auto", True), ("cpu", False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_model_runner(EngineConfig(model=path, device=device, kv_cache_bytes=1 << 20))
        assert (COMMAND in caplog.text) == is_told


@pytest.mark.usefixtures("gpu")
def test_it_is_told_where_cuda_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="This machine has an NVIDIA GPU, and its torch has no CUDA"):
        load_model(EngineConfig(model=str(make_checkpoint("llama", tmp_path)), device="cuda"))
