"""Each benchmark runs, on the least work that its flags allow; what it measures is not tested."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import experts, grammar, linear
from benchmarks.__main__ import programs
from benchmarks.command import exit_with
from benchmarks.grammar import EMBEDDED
from benchmarks.padded_model import save_padded_model
from engine.kernels import load_kernels

LEAST = {
    "adapters": ("--model", str(EMBEDDED), *"--adapters 2 --used 2 --streams 2 --max-tokens 4 --rounds 1".split()),
    "attention": ("--seconds", "0.001"),
    "chat": ("--tokens", "50"),
    "cuda_attention": (),
    "cuda_products": ("speed", "--weights", "o", "--rows", "1"),
    "drafts": ("--model", str(EMBEDDED), "--streams", "1", "--max-tokens", "8", "--rounds", "1", "--drafts", "int4"),
    "experts": ("--seconds", "0.001", "--rows", "1", "40"),
    "grammar": ("--rows", "2", "--steps", "3"),
    "kv_decode": ("4/2x64", "--sequences", "1", "--context", "40", "--rounds", "1"),
    "kv_formats": ("--windows", "1"),
    "kv_store": ("--model", str(EMBEDDED), "--tokens", "100", "--prompts", "1"),
    "linear": ("--seconds", "0.001"),
    "memory": ("--minutes", "0.02", "--concurrency", "2"),
    "plans": ("--prompt-tokens", "16", "--output-tokens", "4", "--rounds", "1"),
    "predictions": ("--model", str(EMBEDDED), "--max-tokens", "60", "--edits", "2", "--rounds", "1"),
    "published_formats": ("awq", "GGUF Q4_0", "--windows", "1"),
    "quantization": ("--windows", "1"),
    "sampling": ("--rows", "2", "--vocab-size", "1000", "--repeats", "1"),
    "serving": ("--concurrency", "2"),
}


LONG = {
    "adapters",
    "attention",
    "drafts",
    "experts",
    "kv_formats",
    "kv_store",
    "linear",
    "memory",
    "plans",
    "predictions",
    "published_formats",
    "quantization",
    "serving",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in programs()])
def test_each_program_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("attention", "experts", "kv_decode", "linear") and load_kernels() is None:
        pytest.skip("no CPU kernels")
    monkeypatch.setattr(grammar, "VOCAB_SIZES", (1000,))
    monkeypatch.setattr(linear, "SHAPES", ((64, 64),))
    monkeypatch.setattr(linear, "WEIGHT_BYTES", 1 << 16)
    monkeypatch.setattr(experts, "SHAPES", (experts.Shape(64, 32, 4, 2),))
    monkeypatch.setattr(experts, "WEIGHT_BYTES", 1 << 16)
    program: Any = import_module(f"benchmarks.{name}")
    code = program.main(LEAST[name])
    assert (
        code == 0 or name == "quantization"
    )  # its code reports larger errors, which on so little text may occur by chance
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [("sampling", "--repeats", "0"), ("attention", "--seconds", "-1"), ("chat", "--tokens", "x")],
)
def test_numbers_that_make_no_sense_are_refused(
    name: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program: Any = import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit, match="2"):
        program.main([flag, value])
    assert f"argument {flag}: '{value}' is not " in capsys.readouterr().err


def test_control_c_ends_a_program_without_a_traceback() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        exit_with(interrupted)


@pytest.mark.slow
def test_a_padded_model_has_the_logits_of_the_small_one(tmp_path: Path) -> None:
    save_padded_model(EMBEDDED, tmp_path, num_layers=6)
    small, large = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (EMBEDDED, tmp_path))
    token_ids = torch.arange(300, 364)[None]
    with torch.inference_mode():
        expected, logits = (model(token_ids).logits for model in (small, large))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-2)
    assert large.num_parameters() > 10 * small.num_parameters()
