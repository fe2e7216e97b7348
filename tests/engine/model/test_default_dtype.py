"""The default dtype of weights, where the configuration says auto."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from engine.core.config import EngineConfig
from engine.kernels import KernelInfo
from engine.model.loading import placement


@pytest.mark.parametrize(
    ("isa", "has_native", "expected"),
    [
        ("amx", True, torch.bfloat16),
        ("avx512", False, torch.bfloat16),  # kernels widen it
        ("avx2", False, torch.bfloat16),
        ("generic", True, torch.bfloat16),
        ("generic", False, torch.float32),
        (None, True, torch.bfloat16),
        (None, False, torch.float32),
    ],
)
def test_weights_are_bfloat16_where_that_is_fast(
    isa: str | None, has_native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "has_native_bf16", lambda: has_native)
    kernels = KernelInfo(isa, Path()) if isa else None
    assert placement._dtype(EngineConfig(model=""), LlamaConfig(), torch.device("cpu"), kernels) is expected
