"""Each benchmark runs, on as little as it can be asked for; what it measures is nobody's concern here."""

from importlib import import_module
from typing import Any

import pytest

from benchmarks import grammar, linear
from benchmarks.__main__ import programs
from engine.kernels import load_kernels

LEAST = {
    "attention": ("--seconds", "0.001"),
    "chat": ("--tokens", "50"),
    "grammar": ("--rows", "2", "--steps", "3"),
    "linear": ("--seconds", "0.001"),
    "quantization": ("--windows", "1"),
    "sampling": ("--rows", "2", "--vocab-size", "1000", "--repeats", "1"),
    "serving": ("--concurrency", "2"),
}


@pytest.mark.parametrize("name", programs())
def test_each_program_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("attention", "linear") and load_kernels() is None:
        pytest.skip("no CPU kernels")
    monkeypatch.setattr(grammar, "VOCAB_SIZES", (1000,))
    monkeypatch.setattr(linear, "SHAPES", ((64, 64),))
    monkeypatch.setattr(linear, "WEIGHT_BYTES", 1 << 16)
    program: Any = import_module(f"benchmarks.{name}")
    code = program.main(LEAST[name])
    assert code == 0 or name == "quantization"  # which tells by its code what errs more, of so little text by chance
    assert capsys.readouterr().out
