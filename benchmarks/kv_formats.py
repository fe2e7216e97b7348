"""`python -m benchmarks.kv_formats`: what KV of 8 or 4 bits costs in accuracy, compared with llama.cpp's formats.

Text that the embedded model was not trained on goes through it in float32, with keys and values after a round trip
through each format; errors are those of logits. Then random queries attend over random keys and values, of which, as in
many models, some channels of the keys are far larger than the others; errors are those of attention's output, relative
to it.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.command import exit_with
from benchmarks.ggml_formats import q4_0, q8_0
from benchmarks.quantization import MODEL, WINDOW, Accuracy, accuracy, docstrings, logits_of, table_of
from engine.attention import registry
from engine.attention.kv_format import KV_DTYPES, dequantize, quantize, undo_transform
from engine.attention.registry import ATTENTION_NAME, AttentionCall, attention_handler
from loadtest.numbers import positive

RoundTrip = Callable[[Tensor], Tensor]  # keys or values [T, heads, size] -> the same, as a cache keeps them


def ours(name: str) -> RoundTrip:
    return lambda x: undo_transform(dequantize(quantize(x, KV_DTYPES[name])))


FORMATS: dict[str, RoundTrip] = {
    "float32": lambda x: x,
    "bfloat16": lambda x: x.bfloat16().float(),
    "int8": ours("int8"),
    "Q8_0": lambda x: q8_0(x).view(x.shape),
    "int4": ours("int4"),
    "Q4_0": lambda x: q4_0(x).view(x.shape),
}
BOUNDS = {"int8": "Q8_0", "int4": "Q4_0"}
SHAPES = {"32 heads of 128, 8 of keys": (32, 8, 128), "14 heads of 64, 2 of keys": (14, 2, 64)}
CONTEXT = 4096  # positions over which random queries attend
NUM_QUERIES = 64
OUTLIERS = (1.0, 20.0)  # factors of every 32nd channel of the keys


class _Attention:
    """Dense causal attention over keys and values after a round trip."""

    def __init__(self, round_trip: RoundTrip) -> None:
        self._round_trip = round_trip

    def attend(self, call: AttentionCall) -> Tensor:
        return _attend(call.query, self._round_trip(call.key), self._round_trip(call.value), call.params.scaling)


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, is_causal: bool = True) -> Tensor:
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    attended = scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scaling, enable_gqa=True)
    return attended[0].transpose(0, 1)


@torch.inference_mode()
def measure(path: Path, text: str, num_windows: int) -> dict[str, Accuracy]:
    """Returns the accuracy of the model's logits with each format."""
    token_ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt", verbose=False).input_ids[0]
    num_windows = min(num_windows, len(token_ids) // WINDOW)
    windows = token_ids[: num_windows * WINDOW].view(-1, WINDOW)
    registry.register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=ATTENTION_NAME).eval()
    truth, results = None, {}
    for name, round_trip in FORMATS.items():
        with attention_handler(_Attention(round_trip)):
            logits = logits_of(model, windows)
        truth = logits if truth is None else truth
        results[name] = accuracy(logits, truth, windows)
    return results


def random_errors(heads: int, kv_heads: int, size: int, outlier: float) -> dict[str, float]:
    """Returns the relative error of attention's output with each format, over random numbers."""
    generator = torch.Generator().manual_seed(size)
    query, key, value = (
        torch.randn(count, num, size, generator=generator)
        for count, num in ((NUM_QUERIES, heads), (CONTEXT, kv_heads), (CONTEXT, kv_heads))
    )
    key[..., ::32] *= outlier
    query[..., ::32] /= outlier  # scores as large as without
    outputs = {
        name: _attend(query, round_trip(key), round_trip(value), size**-0.5, is_causal=False)
        for name, round_trip in FORMATS.items()
    }
    truth = outputs["float32"]
    return {name: float((output - truth).norm() / truth.norm()) for name, output in outputs.items()}


def main(arguments: list[str] | None = None) -> int:
    """Prints tables of errors; returns 1 when a format errs more than llama.cpp's of as many bits."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_formats", description=(__doc__ or "").partition(": ")[2].partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint directory (default: the embedded model)")
    parser.add_argument("--text", type=Path, help="file to read (default: docstrings of torch.nn)")
    parser.add_argument("--windows", type=positive, default=32, help=f"of {WINDOW} tokens each, at most (default: 32)")
    options = parser.parse_args(arguments)
    results = measure(options.model, options.text.read_text("utf-8") if options.text else docstrings(), options.windows)
    Console(width=None if sys.stdout.isatty() else 100).print(table_of(results, "KV cache"))
    errors = {options.model.name: {name: result.rms for name, result in results.items()}}
    for shape, sizes in SHAPES.items():
        for outlier in OUTLIERS:
            case = f"{shape}, channels {outlier:.0f} times as large"
            errors[case] = random_errors(*sizes, outlier)
            print(f"{case}: " + ", ".join(f"{name} {error:.5f}" for name, error in errors[case].items()))
    worse = [(case, name) for case, of in errors.items() for name, bound in BOUNDS.items() if of[name] > of[bound]]
    for case, name in worse:
        print(f"{case}: {name} errs more than {BOUNDS[name]}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    exit_with(main)
