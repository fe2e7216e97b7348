"""What grammars cost, in the masks of a step over large vocabularies and in a model's decode steps; and what they save.

The vocabularies are random words, and each next token is a random one of those allowed: harder on the lexer's caches
than the output of a model. What jump-forward decoding saves is counted: the decode steps of a JSON text, in tokens of
the model's tokenizer, if each step also drafts the text that the grammar leaves no choice about.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import engine
from benchmarks.command import exit_with
from engine.assembly import load_engine
from engine.core.batch import ScheduledRequest
from engine.core.config import EngineConfig, EngineInfo
from engine.core.generation_request import GenerationRequest
from engine.core.messages import AddRequest
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.grammar.compiler import GrammarCompiler, compiler_for, make_tokenizer
from engine.grammar.lark import JSON_OBJECT, JsonSchema, to_lark
from engine.grammar.matcher import Matcher
from engine.runner.logits_processors import forbid_tokens
from engine.text.tokenizer import Tokenizer
from loadtest.numbers import positive

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

ORDER = {
    "customer_name": "Ada Lovelace",
    "order_number": 1815,
    "is_paid": True,
    "delivery_address": {"street": "12 St James's Square", "postal_code": "10115", "country": "Germany"},
    "comment": "Please ring twice.",
}
CALL = {"name": "get_current_weather", "arguments": {"location": "Boston, MA", "unit": "celsius"}}
ANSWERS = {"an object": (ORDER, {}), "a tool call": (CALL, {"name": {"const": CALL["name"]}})}


def random_words(vocab_size: int) -> list[bytes]:
    """Returns a vocabulary: all bytes, EOS, and then words as a tokenizer has them, half of them after a space."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 9))) for _ in range(vocab_size - 257)]
    return [*(bytes([byte]) for byte in range(256)), b"", *((rng.choice(("", " ")) + word).encode() for word in words)]


def mask_seconds(compiler: GrammarCompiler, grammar: str, vocab_size: int, rows: int, steps: int) -> Iterator[float]:
    """Yields each step's time: it computes all rows' masks, and applies them to the logits."""
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
                matchers[index], outputs[index] = compiler(grammar), []


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


def schema_of(value: Any) -> dict[str, Any]:
    """Returns the JSON schema of all values that have the value's type, or its properties."""
    if not isinstance(value, dict):
        return {"type": {str: "string", int: "integer", bool: "boolean"}[type(value)]}
    properties = {name: schema_of(each) for name, each in value.items()}
    return {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}


def num_steps(matcher: Matcher, token_ids: Sequence[int], max_tokens: int) -> int:
    """Counts the steps that generate these tokens, if each drafts at most `max_tokens` forced tokens."""
    generated = steps = 0
    while generated < len(token_ids):
        forced = matcher.forced_tokens(token_ids[:generated], max_tokens)
        pairs = zip(forced, token_ids[generated:], strict=False)
        generated += 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        steps += 1
    return steps


def jump_forward_table(tokenizer: Tokenizer, info: EngineInfo) -> Table:
    compiler = compiler_for(tokenizer, info)
    table = Table("answer", "tokens", "steps with jump-forward")
    for name, (value, properties) in ANSWERS.items():
        schema = schema_of(value)
        schema["properties"] |= properties
        for layout, separators in {"": (", ", ": "), ", without spaces": (",", ":")}.items():
            token_ids = tokenizer.encode(json.dumps(value, separators=separators))
            steps = num_steps(compiler(to_lark(JsonSchema(schema))), token_ids, max_tokens=8)
            table.add_row(name + layout, str(len(token_ids)), str(steps))
    return table


def decode_seconds(engine: Engine, grammar: str | None, rows: int, max_tokens: int) -> float:
    """Returns the median time of a decode step of `rows` requests."""
    for index in range(rows):
        bias = {token_id: -100.0 for token_id in engine.info.eos_token_ids}
        params = SamplingParams(max_tokens=max_tokens, seed=index, grammar=grammar, logit_bias=bias)
        name = f"{grammar is None}-{index}"
        asked = GenerationRequest(prompt_token_ids=[index], params=params, arrival_s=0.0)
        engine.add_request(AddRequest(request_id=name, asked=asked))
    steps = []
    while engine.has_work:
        stats = engine.step().stats
        if stats.phase == "decode" and stats.num_requests == rows:
            steps.append(stats.duration_s)
    return statistics.median(steps)


def main(arguments: list[str] | None = None) -> int:
    """Prints both tables, and the share of a model's decode steps that goes into masks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grammar", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(EMBEDDED), help="checkpoint directory (default: the embedded model)")
    parser.add_argument("--rows", type=positive, default=32, help="sequences in a step (default: 32)")
    parser.add_argument("--steps", type=positive, default=100, help="steps of each measurement (default: 100)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(mask_table(options.rows, options.steps))
    model = load_engine(EngineConfig(model=options.model))
    for _ in range(2):  # the first turn warms up
        free = decode_seconds(model, None, options.rows, options.steps)
        bound = decode_seconds(model, GRAMMARS["a schema"], options.rows, options.steps)
    model.close()
    console.print(jump_forward_table(Tokenizer.from_pretrained(options.model), model.info))
    print(f"decode step of {options.rows}: {free * 1e3:.2f} ms free, {bound * 1e3:.2f} ms with a grammar", end=" ")
    print(f"({(bound - free) / bound:.1%} of it for the grammar; {model.info.vocab_size:,} tokens)")
    return 0


if __name__ == "__main__":
    exit_with(main)
