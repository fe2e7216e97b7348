"""What grammars cost: the masks of a step over large vocabularies, and the decode steps of a model with and without.

The vocabularies are random words, and each next token is a random one of those allowed: harder on the lexer's caches
than a model that knows what it writes.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import engine
from engine.batch import ScheduledRequest
from engine.config import EngineConfig
from engine.engine import Engine
from engine.grammar import GrammarCompiler, make_tokenizer
from engine.grammar_source import JSON_OBJECT, JsonSchema, to_lark
from engine.logits import forbid_tokens
from engine.matcher import Matcher
from engine.messages import AddRequest
from engine.sampling_params import SamplingParams

VOCAB_SIZES = (32_000, 150_000)
EMBEDDED = Path(engine.__file__).parent / "embedded_model"
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["small", "medium", "large"]},
        "when": {"type": "string", "format": "date-time"},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "when", "count"],
    "additionalProperties": False,
}
GRAMMARS = {
    "any object": to_lark(JSON_OBJECT),
    "a schema": to_lark(JsonSchema({"type": "array", "items": _ITEM, "minItems": 100})),
}


def random_words(vocab_size: int) -> list[bytes]:
    """All bytes, EOS, and then words as a tokenizer has them: half of them behind a space."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 9))) for _ in range(vocab_size - 257)]
    return [*(bytes([byte]) for byte in range(256)), b"", *((rng.choice(("", " ")) + word).encode() for word in words)]


def mask_seconds(compiler: GrammarCompiler, grammar: str, vocab_size: int, rows: int, steps: int) -> Iterator[float]:
    """Per step: all rows' masks, and applying them to the logits."""
    rng = np.random.default_rng(0)
    matchers = [compiler(grammar) for _ in range(rows)]
    outputs: list[list[int]] = [[] for _ in matchers]
    for _ in range(steps):
        logits = torch.zeros(rows, vocab_size)
        start = time.perf_counter()
        masks = [matcher.allowed_tokens(output)[0] for matcher, output in zip(matchers, outputs, strict=True)]
        forbid_tokens(logits, [_row(mask) for mask in masks])
        yield time.perf_counter() - start
        for index, mask in enumerate(masks):
            token_id = _random_bit(mask, rng)
            outputs[index].append(token_id)
            if token_id == 256:
                matchers[index], outputs[index] = _again(compiler, grammar)


def _again(compiler: GrammarCompiler, grammar: str) -> tuple[Matcher, list[int]]:
    return compiler(grammar), []


def _row(mask: bytes) -> ScheduledRequest:
    return ScheduledRequest("", (), 0, (), SamplingParams(), (), (), True, (mask,))


def _random_bit(mask: bytes, rng: np.random.Generator) -> int:
    return int(rng.choice(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))))


def mask_table(rows: int, steps: int) -> Table:
    table = Table()
    for heading in ("vocabulary", "grammar", "compile", f"step of {rows} rows", "per row", "worst step"):
        table.add_column(heading, justify="right")
    for vocab_size in VOCAB_SIZES:
        compiler = GrammarCompiler(make_tokenizer(random_words(vocab_size), [256]))
        for name, grammar in GRAMMARS.items():
            start = time.perf_counter()
            compiler(grammar)
            compile_s = time.perf_counter() - start
            seconds = list(mask_seconds(compiler, grammar, vocab_size, rows, steps))
            median = statistics.median(seconds)
            cells = (f"{compile_s * 1e3:.1f} ms", f"{median * 1e3:.2f} ms", f"{median / rows * 1e6:.0f} us")
            table.add_row(f"{vocab_size:,}", name, *cells, f"{max(seconds) * 1e3:.1f} ms")
    return table


def decode_seconds(model: Engine, grammar: str | None, rows: int, max_tokens: int) -> float:
    """The median decode step of that many sequences."""
    for index in range(rows):
        bias = {token_id: -100.0 for token_id in model.info.eos_token_ids}
        params = SamplingParams(max_tokens=max_tokens, seed=index, grammar=grammar, logit_bias=bias)
        name = f"{grammar is None}-{index}"
        model.add_request(AddRequest(request_id=name, prompt_token_ids=[index], params=params, arrival_s=0.0))
    steps = []
    while model.has_work:
        stats = model.step().stats
        if stats.phase == "decode" and stats.num_requests == rows:
            steps.append(stats.duration_s)
    return statistics.median(steps)


def main(arguments: list[str] | None = None) -> int:
    """Prints a table and the share of a model's decode steps that goes into masks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grammar", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(EMBEDDED), help="checkpoint directory (default: the embedded model)")
    parser.add_argument("--rows", type=int, default=32, help="sequences in a step (default: 32)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each measurement (default: 100)")
    options = parser.parse_args(arguments)
    Console(width=None if sys.stdout.isatty() else 100).print(mask_table(options.rows, options.steps))
    model = Engine.from_config(EngineConfig(model=options.model))
    for _ in range(2):  # the first turn warms up
        free = decode_seconds(model, None, options.rows, options.steps)
        bound = decode_seconds(model, GRAMMARS["a schema"], options.rows, options.steps)
    model.close()
    print(f"decode step of {options.rows}: {free * 1e3:.2f} ms free, {bound * 1e3:.2f} ms with a grammar", end=" ")
    print(f"({(bound - free) / bound:.1%} of it for the grammar; {model.info.vocab_size:,} tokens)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
