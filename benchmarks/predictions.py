"""How much faster an answer is that the client predicted but for some edits (the parameter `prediction`).

The model writes an answer, without drafts and with those of its own text. Then it writes the same answer with a
prediction: the answer after as many edits as given, each of which replaces, inserts or leaves out some tokens at a
random place. Without --model it is the embedded model padded to 0.36 B parameters.
"""

import argparse
import inspect
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.command import exit_with
from benchmarks.drafts import PROMPT_TOKENS, Run, prompts_of, run
from benchmarks.grammar import EMBEDDED
from benchmarks.padded_model import save_padded_model
from engine.assembly import load_engine
from engine.core.config import EngineConfig
from engine.engine import Engine
from engine.text.tokenizer import Tokenizer
from loadtest.numbers import positive

MAX_EDIT = 8  # tokens


def edited(tokens: Sequence[int], num_edits: int, rng: random.Random) -> tuple[int, ...]:
    """Returns the tokens after edits at random places, as many as given."""
    edits = list(tokens)
    for at in sorted(rng.sample(range(len(tokens)), num_edits), reverse=True):
        num_old, num_new = rng.choice([(1, 1), (rng.randint(1, MAX_EDIT), 0), (0, rng.randint(1, MAX_EDIT)), (4, 6)])
        edits[at : at + num_old] = rng.choices(tokens, k=num_new)
    return tuple(edits)


def compare(engine: Engine, plain: Engine, prompts: Sequence[list[int]], options: argparse.Namespace) -> Table:
    """Returns a table with a row for each number of edits."""
    table = Table(
        "edits", "tok/s without drafts", "of the text", "predicted", "ratio to without", "(range)", "tokens per step"
    )
    for num_edits in options.edits:
        rng, rounds = random.Random(num_edits), list[tuple[Run, ...]]()
        for _ in range(options.rounds):
            speeds = [run(each, prompts, options.temperature, options.max_tokens) for each in (plain, engine)]
            predictions = [edited(answer, num_edits, rng) for answer in speeds[0].answers.values()]
            predicted = run(engine, prompts, options.temperature, options.max_tokens, predictions)
            assert speeds[0].answers == speeds[1].answers == predicted.answers, "a draft changed an answer"
            rounds.append((*speeds, predicted))
        ratios = sorted(each[2].tokens_per_s / each[0].tokens_per_s for each in rounds)
        table.add_row(
            str(num_edits),
            *(f"{statistics.median(each[index].tokens_per_s for each in rounds):.0f}" for index in range(3)),
            f"{statistics.median(ratios):.2f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            f"{options.max_tokens / statistics.median(each[2].num_steps for each in rounds):.1f}",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Prints a table for each number of concurrent streams."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predictions", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: the embedded model, padded)")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="of weights")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1], help="at once (default: 1)")
    parser.add_argument("--max-tokens", type=positive, default=1900, help="of each answer (default: 1900)")
    parser.add_argument("--edits", type=int, nargs="+", default=[0, 10, 40], help="of each (default: 0 10 40)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of all answers (default: 0.7)")
    parser.add_argument("--rounds", type=positive, default=3, help="(default: 3)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory() as directory:
        if options.model is None:
            save_padded_model(EMBEDDED, Path(directory))
        source = str(options.model or directory)
        length = PROMPT_TOKENS + options.max_tokens
        settings = {"model": source, "quantization": options.quantization, "max_model_len": length}
        engine = load_engine(EngineConfig(**settings))
        plain = load_engine(EngineConfig(**settings, num_speculative_tokens=0))
        token_ids = Tokenizer.from_pretrained(source).encode(
            Path(inspect.getfile(argparse)).read_text(encoding="utf-8")
        )
        for count in options.streams:
            console.print(f"{count} at once")
            console.print(compare(engine, plain, prompts_of(token_ids, count), options))
    return 0


if __name__ == "__main__":
    exit_with(main)
