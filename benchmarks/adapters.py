"""What adapters (LoRA) cost: streams with different ones in one batch, beside the same streams without any.

One engine has all adapters loaded; it runs the same prompts in turn without adapters, with one for all, and with
`--used` different ones. Adapters are random, of every linear layer of a decoder.
"""

import argparse
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command import exit_with
from benchmarks.drafts import PROMPT_TOKENS, prompts_of
from benchmarks.grammar import EMBEDDED
from benchmarks.padded_model import save_padded_model
from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.core.generation_request import GenerationRequest
from engine.core.messages import AddRequest
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.model.setup import load_model_runner
from engine.text.tokenizer import Tokenizer
from loadtest.numbers import positive

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layers_of(model: str) -> dict[str, tuple[int, int]]:
    """Returns the shape [N, K] of each layer that adapters add to, by the name that PEFT gives it."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    layers = ((name, each) for name, each in module.named_modules() if name.rpartition(".")[2] in MODULES)
    return {f"base_model.model.{name}": (each.out_features, each.in_features) for name, each in layers}


def save_adapter(directory: Path, shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    """Writes an adapter as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        tensors[f"{name}.lora_A.weight"] = 0.02 * torch.randn(rank, columns, generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.02 * torch.randn(rows, rank, generator=generator)
    directory.mkdir()
    save_file({name: each.bfloat16() for name, each in tensors.items()}, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*MODULES]}
    (directory / "adapter_config.json").write_text(json.dumps(settings))


def load(model: str, quantization: str, max_model_len: int) -> Engine:
    config = EngineConfig(
        model=model,
        quantization=quantization,
        max_model_len=max_model_len,
        num_speculative_tokens=0,
        enable_prefix_caching=False,
    )
    runner, info = load_model_runner(config)
    return assemble(config, info, runner, adapters=runner.adapters)


def tokens_per_s(engine: Engine, prompts: Sequence[list[int]], adapters: Sequence[str], max_tokens: int) -> float:
    """Runs all prompts at once, each with one of the adapters in turn; returns its tokens per second of decode."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        adapter = adapters[index % len(adapters)]
        asked = GenerationRequest(prompt_token_ids=prompt, params=params, arrival_s=0.0, adapter=adapter)
        engine.add_request(AddRequest(request_id=str(index), asked=asked))
    num_tokens, seconds = 0, 0.0
    while engine.has_work:
        started_s = time.perf_counter()
        step = engine.step()
        if step.stats.phase == "decode":
            seconds += time.perf_counter() - started_s
            num_tokens += sum(len(update.token_ids) for update in step.updates)
    return num_tokens / seconds


def compare(engine: Engine, prompts: Sequence[list[int]], digests: Sequence[str], options: argparse.Namespace) -> Table:
    """Returns a table with a row for each load. The first round does not count."""
    loads = {"without": [""], "one for all": digests[:1], f"{options.used} different": digests[: options.used]}
    rounds = [
        {name: tokens_per_s(engine, prompts, each, options.max_tokens) for name, each in loads.items()}
        for _ in range(1 + options.rounds)
    ][1:]
    table = Table("adapters", "tok/s", "ratio", "(range)")
    for name in loads:
        ratios = sorted(each[name] / each["without"] for each in rounds)
        speed = statistics.median(each[name] for each in rounds)
        table.add_row(name, f"{speed:.0f}", f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}")
    return table


def main(arguments: list[str] | None = None) -> int:
    """Prints a table for each number of concurrent streams."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: the embedded model, padded)")
    parser.add_argument("--adapters", type=positive, default=100, help="loaded (default: 100)")
    parser.add_argument("--used", type=positive, default=16, help="different ones in a batch (default: 16)")
    parser.add_argument("--rank", type=positive, default=16, help="of each adapter (default: 16)")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 32], help="at once (default: 1 32)")
    parser.add_argument("--max-tokens", type=positive, default=64, help="of each answer (default: 64)")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="of the weights")
    parser.add_argument("--rounds", type=positive, default=5, help="measured, after one that is not (default: 5)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 100)
    with tempfile.TemporaryDirectory() as directory:
        source = str(options.model or Path(directory) / "model")
        if options.model is None:
            save_padded_model(EMBEDDED, Path(source))
        engine = load(source, options.quantization, PROMPT_TOKENS + options.max_tokens)
        shapes, digests = layers_of(source), []
        for number in range(options.adapters):
            save_adapter(path := Path(directory) / str(number), shapes, options.rank, number)
            digests.append(engine.load_adapter(str(path)).digest)
        token_ids = Tokenizer.from_pretrained(source).encode(Path(inspect.getfile(argparse)).read_text("utf-8"))
        for count in options.streams:
            console.print(f"{count} at once")
            console.print(compare(engine, prompts_of(token_ids, count), digests, options))
    return 0


if __name__ == "__main__":
    exit_with(main)
