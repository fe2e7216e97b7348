"""`python -m benchmarks.published_formats`: how exactly a model in each published format is computed.

The embedded model is written in each format, loaded as a server loads it, and reads a text that it was not trained on.
Errors are those of logits against a forward pass in float64 of the numbers that the format defines. Beside them is the
error of transformers with these numbers in the type in which the model is served, and what the format itself costs.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.command import exit_with
from benchmarks.formats.checkpoints import Gguf, Published
from benchmarks.formats.llama import Rounding, Weights, exact, logits_in_float64
from benchmarks.formats.table import FORMATS
from benchmarks.quantization import MODEL, WINDOW, Accuracy, accuracy, docstrings, logits_of
from engine.attention import select_backend
from engine.attention.kv_cache import KVCache
from engine.core.batch import ScheduledRequest
from engine.core.config import EngineConfig
from engine.core.sampling_params import SamplingParams
from engine.kernels import load_kernels
from engine.model.forward_choice import choose_forward
from engine.model.loader import load_model
from engine.runner.model_inputs import build_inputs
from loadtest.numbers import positive


@dataclass(frozen=True)
class Result:
    """How exactly a model in one format is computed."""

    bits: float
    dtype: torch.dtype
    """Type in which it is served."""
    served: Accuracy
    """Accuracy of twostep against the definition in float64."""
    plain: Accuracy
    """Accuracy of transformers with the same numbers in that type."""
    rounded: Accuracy | None
    """Accuracy of twostep against the definition with rows that are rounded; None where the method rounds none."""
    cost: Accuracy
    """Accuracy of the definition against the weights before they were quantized."""


@dataclass(frozen=True)
class Text:
    """A checkpoint, and what it reads."""

    model: Path
    windows: Tensor  # [num, T]

    @cached_property
    def config(self) -> Any:
        return AutoConfig.from_pretrained(self.model)

    @cached_property
    def unquantized(self) -> Tensor:
        """The logits of the checkpoint's own weights in float64."""
        weights = load_file(self.model / "model.safetensors")
        return _true_logits(self, {name: weight.double() for name, weight in weights.items()})


def measure(form: Published | Gguf, text: Text, folder: Path) -> Result:
    """Writes the checkpoint to `folder` in a format, and reads the text."""
    written = form.write(text.model, folder)
    truth = _true_logits(text, written.weights)
    logits, dtype = served_logits(written.path, text.windows)
    rounded = form.rounding and _true_logits(text, written.weights, form.rounding)
    return Result(
        bits=written.bits,
        dtype=dtype,
        served=accuracy(logits, truth, text.windows),
        plain=accuracy(_plain_logits(text, written.weights, dtype), truth, text.windows),
        rounded=None if rounded is None else accuracy(logits, rounded, text.windows),
        cost=accuracy(truth, text.unquantized, text.windows),
    )


def _true_logits(text: Text, weights: Weights, rounding: Rounding = exact) -> Tensor:
    return torch.stack([logits_in_float64(text.config, weights, window, rounding) for window in text.windows])


def _plain_logits(text: Text, weights: Weights, dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_config(text.config, dtype=dtype).eval()
    model.load_state_dict(dict(weights), strict=False)
    return logits_of(model, text.windows).double()


def served_logits(path: Path, windows: Tensor) -> tuple[Tensor, torch.dtype]:
    """Returns the logits of a model as it is served by default, in float64, and the type in which it is computed."""
    config = EngineConfig(model=str(path), device="cpu")
    model = load_model(config)
    blocks = range(-(-windows.shape[1] // config.block_size))
    cache = KVCache(model.layers, len(blocks), config.block_size, model.kv_dtype, model.device)
    forward = choose_forward(model.module, cache, select_backend(model.device, load_kernels()))
    logits = []
    for window in windows:
        tokens = window.tolist()
        request = ScheduledRequest("text", tokens, 0, tuple(blocks), SamplingParams(), tokens, [], False)
        inputs = build_inputs([request], config.block_size, model.device)
        with torch.inference_mode():
            logits.append(forward(inputs, None).logits.double())
    return torch.stack(logits), model.dtype


def table_of(results: dict[str, Result]) -> Table:
    table = Table()
    headings = ("bits", "type", "rms error", "largest", "same token", "transformers", "rows rounded")
    for heading in ("format", *headings, "divergence"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    for name, result in results.items():
        table.add_row(
            *(name, f"{result.bits:.2f}", str(result.dtype).removeprefix("torch.")),
            *(f"{result.served.rms:.2g}", f"{result.served.largest:.2g}", f"{result.served.top_1:.2%}"),
            *(f"{result.plain.rms:.2g}", "-" if result.rounded is None else f"{result.rounded.rms:.2g}"),
            f"{result.cost.divergence:.2g}" if result.cost.divergence > 1e-12 else "0",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Prints a table of formats."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_formats", description=(__doc__ or "").partition(": ")[2].partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="FORMAT", help=f"default: all of {', '.join(FORMATS)}")
    parser.add_argument("--text", type=Path, help="file to read (default: docstrings of torch.nn)")
    parser.add_argument("--windows", type=positive, default=2, help=f"of {WINDOW} tokens each, at most (default: 2)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in FORMATS]:
        parser.error(f"no format is called {unknown[0]!r}")
    text = options.text.read_text(encoding="utf-8") if options.text else docstrings()
    token_ids = AutoTokenizer.from_pretrained(MODEL)(text, return_tensors="pt", verbose=False).input_ids[0]
    num_windows = min(options.windows, len(token_ids) // WINDOW)
    read = Text(MODEL, token_ids[: num_windows * WINDOW].view(-1, WINDOW))
    load_kernels()  # are not compiled again for the cache below
    results = {}
    for name in options.names or FORMATS:
        with TemporaryDirectory() as folder, patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
            results[name] = measure(FORMATS[name], read, Path(folder))
    Console(width=None if sys.stdout.isatty() else 140).print(table_of(results))
    return 0


if __name__ == "__main__":
    exit_with(main)
