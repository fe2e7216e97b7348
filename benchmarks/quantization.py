"""`python -m benchmarks.quantization`: what quantized weights cost in accuracy, compared with llama.cpp's formats.

Text that the embedded model was not trained on goes through it with its own weights, with twostep's of 8 and 4 bits,
and with the same weights after a round trip through Q8_0 and Q4_0: as such, and with rows rounded to Q8_0, as llama.cpp
does before it multiplies. Errors are those of logits against the float32 model. `int8 per channel` is the form that
suits integer matrix units best: one scale per output channel, and rows of 8 bits, too.
"""

import argparse
import ast
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.command import exit_with
from benchmarks.ggml_formats import q4_0, q8_0
from engine.kernels import load_kernels
from engine.weights.linear import prepare_linears
from loadtest.numbers import positive

MODEL = Path(__file__).parent.parent / "engine" / "embedded_model"
WINDOW = 512  # tokens read at once

Convert = Callable[[PreTrainedModel], object]  # converts a model in place


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a variant over all positions of the text; errors are against the float32 model's logits."""

    perplexity: float
    rms: float
    largest: float
    divergence: float  # Kullback-Leibler divergence from the float32 model's distribution, in nats per token
    top_1: float  # share of positions where both find the same token likeliest


def ours(quantization: str) -> Convert:
    return lambda model: prepare_linears(model, load_kernels() is not None, quantization)


def with_weights(layers: Callable[[Tensor], Tensor], head: Callable[[Tensor], Tensor]) -> Convert:
    """Returns a conversion that puts every linear layer's weight through a round trip.

    An embedding that shares its weight with the head keeps its own numbers.
    """

    def convert(model: PreTrainedModel) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                round_trip = head if module is model.get_output_embeddings() else layers
                module.weight = nn.Parameter(round_trip(module.weight.detach()).to(module.weight.dtype), False)

    return convert


def with_rows(convert: Convert, rounded: Callable[[Tensor], Tensor]) -> Convert:
    """Returns the conversion `convert`, with a round trip of every linear layer's input rows, too."""

    def convert_and_round(model: PreTrainedModel) -> None:
        convert(model)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]).to(inputs[0].dtype),))

    return convert_and_round


def per_channel(rows: Tensor) -> Tensor:  # [..., K], each row with a scale of its own
    scales = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (rows / scales).round() * scales


VARIANTS: dict[str, tuple[torch.dtype, Convert]] = {
    "bfloat16": (torch.bfloat16, ours("none")),
    "int8": (torch.float32, ours("int8")),
    "Q8_0": (torch.float32, with_weights(q8_0, q8_0)),
    "Q8_0 and rows": (torch.float32, with_rows(with_weights(q8_0, q8_0), q8_0)),
    "int8 per channel": (torch.float32, with_rows(with_weights(per_channel, per_channel), per_channel)),
    "int8, bfloat16": (torch.bfloat16, ours("int8")),
    "Q8_0 and rows, bfloat16": (torch.bfloat16, with_rows(with_weights(q8_0, q8_0), q8_0)),
    "int4": (torch.float32, ours("int4")),
    "Q4_0": (torch.float32, with_weights(q4_0, q8_0)),
    "Q4_0 and rows": (torch.float32, with_rows(with_weights(q4_0, q8_0), q8_0)),
    "int4, bfloat16": (torch.bfloat16, ours("int4")),
    "Q4_0, bfloat16": (torch.bfloat16, with_weights(q4_0, q8_0)),
}
BOUNDS = {
    "int8": "Q8_0 and rows",
    "int8, bfloat16": "Q8_0 and rows, bfloat16",
    "int4": "Q4_0",
    "int4, bfloat16": "Q4_0, bfloat16",
}


@torch.inference_mode()
def logits_of(model: PreTrainedModel, windows: Tensor) -> Tensor:  # [num, WINDOW] -> [num, WINDOW, vocab]
    return torch.cat([model(window[None], use_cache=False).logits.float() for window in windows])


def accuracy(logits: Tensor, truth: Tensor, windows: Tensor) -> Accuracy:
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    errors = (logits - truth).abs()
    return Accuracy(
        perplexity=loss.exp().item(),
        rms=errors.square().mean().sqrt().item(),
        largest=errors.max().item(),
        divergence=_divergence(logits, truth),
        top_1=(logits.argmax(-1) == truth.argmax(-1)).float().mean().item(),
    )


def _divergence(logits: Tensor, truth: Tensor) -> float:
    logs, true_logs = (x.flatten(0, 1).log_softmax(-1) for x in (logits, truth))
    return nn.functional.kl_div(logs, true_logs, reduction="batchmean", log_target=True).item()


def docstrings() -> str:
    """Returns the docstrings of torch.nn: text like that which the embedded model was trained on, but no part of it."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sorted(Path(nn.__file__).parent.rglob("*.py")))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = (ast.get_docstring(node) for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(filter(None, texts))


def measure(path: Path, text: str, num_windows: int) -> dict[str, Accuracy]:
    token_ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt", verbose=False).input_ids[0]
    num_windows = min(num_windows, len(token_ids) // WINDOW)
    windows = token_ids[: num_windows * WINDOW].view(-1, WINDOW)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    truth = logits_of(model, windows)
    results = {"float32": accuracy(truth, truth, windows)}
    for name, (dtype, convert) in VARIANTS.items():
        variant = copy.deepcopy(model).to(dtype)
        convert(variant)
        results[name] = accuracy(logits_of(variant, windows), truth, windows)
    return results


def table_of(results: dict[str, Accuracy], varied: str = "weights") -> Table:
    table = Table()
    for heading in (varied, "perplexity", "rms error", "largest error", "divergence", "same likeliest token"):
        table.add_column(heading, justify="left" if heading == varied else "right")
    for name, result in results.items():
        errors = (f"{result.rms:.4f}", f"{result.largest:.3f}", f"{result.divergence:.2g}", f"{result.top_1:.2%}")
        table.add_row(name, f"{result.perplexity:.3f}", *errors)
    return table


def main(arguments: list[str] | None = None) -> int:
    """Prints a table of variants.

    Returns 1 when `int8` errs more than Q8_0 does in llama.cpp, or `int4` more than Q4_0 with exact rows.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantization", description=(__doc__ or "").partition(": ")[2].partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint directory (default: the embedded model)")
    parser.add_argument("--text", type=Path, help="file to read (default: docstrings of torch.nn)")
    parser.add_argument("--windows", type=positive, default=32, help=f"of {WINDOW} tokens each, at most (default: 32)")
    options = parser.parse_args(arguments)
    text = options.text.read_text(encoding="utf-8") if options.text else docstrings()
    results = measure(options.model, text, options.windows)
    Console(width=None if sys.stdout.isatty() else 100).print(table_of(results))
    worse = [name for name, bound in BOUNDS.items() if results[name].rms > results[bound].rms]
    for name in worse:
        print(f"{name} errs more than {BOUNDS[name]}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    exit_with(main)
