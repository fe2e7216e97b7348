"""How much faster answers are with drafts: of an MTP head, or of rounded weights (--draft-quantization int4).

The same model runs with and without its draft model in turn, on the same prompts, and must generate the same tokens.
Its weights are loaded once, since of two copies one may lie in slower memory; what a head needs of hidden states is
kept without drafts, too. Without --model it is the embedded model padded to 0.36 B parameters
(benchmarks/padded_model.py): it takes the time of a large model, and accepts as many draft tokens as one that was
trained.
"""

import argparse
import inspect
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.command import exit_with
from benchmarks.grammar import EMBEDDED
from benchmarks.padded_model import MTP_HEAD, randomize, save_padded_model
from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.core.draft import NO_DRAFT, Draft, Drafter
from engine.core.generation_request import GenerationRequest
from engine.core.messages import AddRequest
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.model.setup import load_model_runner
from engine.scheduling.speculation.prompt_lookup import PromptLookup
from engine.text.tokenizer import Tokenizer
from loadtest.numbers import positive

PROMPT_TOKENS = 128
TEMPERATURES = (0.0, 0.7)


class Run(NamedTuple):
    """One run of all prompts on one engine."""

    answers: dict[str, list[int]]
    tokens_per_s: float
    """Tokens per second, all requests together, after the last prefill step."""
    num_steps: int
    num_drafts: int
    num_accepted_drafts: int


class NoPromptLookup:
    """A drafter that proposes nothing, but leaves the request free to be drafted for by the draft model."""

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        return NO_DRAFT


def load(
    model: str,
    drafts: str,
    max_model_len: int,
    new_drafters: tuple[Callable[[], Drafter], Callable[[], Drafter]],
    quantization: str,
) -> tuple[Engine, Engine]:
    """Returns two engines over one model and one KV cache, of which one may run at a time: one without the draft model,
    and one with it."""
    config = EngineConfig(
        model=model,
        mtp=drafts == "mtp",
        draft_quantization="int4" if drafts == "int4" else "none",
        quantization=quantization,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )
    runner, info = load_model_runner(config)
    without = msgspec.structs.replace(info, draft_size=None, draft_kv_bytes=0)
    plain, drafting = (
        assemble(config, each, runner, new_drafter=new_drafter)
        for each, new_drafter in zip((without, info), new_drafters, strict=True)
    )
    return plain, drafting


def prompts_of(token_ids: Sequence[int], count: int) -> list[list[int]]:
    """Returns `count` pieces of the text from random positions, the same ones in every call."""
    starts = random.Random(count).choices(range(max(1, len(token_ids) - PROMPT_TOKENS)), k=count)
    return [[*token_ids[start : start + PROMPT_TOKENS]] for start in starts]


def run(
    engine: Engine,
    prompts: Sequence[list[int]],
    temperature: float,
    max_tokens: int,
    predictions: Sequence[tuple[int, ...]] = (),
) -> Run:
    """Runs all prompts at once, to the end; `predictions` are the tokens of predicted outputs, if there are any."""
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, (name, prompt) in enumerate(zip(answers, prompts, strict=True)):
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=index,
            ignore_eos=True,
            predicted_token_ids=predictions[index] if predictions else (),
        )
        asked = GenerationRequest(prompt_token_ids=prompt, params=params, arrival_s=0.0)
        engine.add_request(AddRequest(request_id=name, asked=asked))
    steps = []
    started_s = 0.0
    while engine.has_work:
        step = engine.step()
        for update in step.updates:
            answers[update.request_id] += update.token_ids
        if step.stats.phase == "decode":
            steps.append(step.stats)
        else:
            started_s, num_first = time.perf_counter(), sum(map(len, answers.values()))
    speed = (len(prompts) * max_tokens - num_first) / (time.perf_counter() - started_s)
    return Run(answers, speed, len(steps), steps[-1].num_drafts, steps[-1].num_accepted_drafts)


def compare(engines: Sequence[Engine], prompts: Sequence[list[int]], options: argparse.Namespace) -> Table:
    """Returns a table with a row for each temperature.

    The first round does not count: engines learn step times and acceptance rates in it.
    """
    table = Table("temperature", "tok/s without", "with", "ratio", "(range)", "tokens per step", "drafts accepted")
    for temperature in options.temperatures:
        rounds = []
        for number in range(1 + options.rounds):
            runs = {
                index: run(engines[index], prompts, temperature, options.max_tokens)
                for index in ((0, 1) if number % 2 else (1, 0))  # none is always the first
            }
            rounds.append([runs[0], runs[1]])
            assert runs[0].answers == runs[1].answers, "draft tokens changed an answer"
        ratios = sorted(drafting.tokens_per_s / plain.tokens_per_s for plain, drafting in rounds[1:])
        speeds = [statistics.median(each[index].tokens_per_s for each in rounds[1:]) for index in (0, 1)]
        first, last = rounds[0][1], rounds[-1][1]
        num_steps = sum(each[1].num_steps for each in rounds[1:])
        num_tokens = options.rounds * options.max_tokens
        num_accepted = last.num_accepted_drafts - first.num_accepted_drafts
        acceptance_rate = num_accepted / max(1, last.num_drafts - first.num_drafts)
        table.add_row(
            f"{temperature:g}",
            *(f"{speed:.0f}" for speed in speeds),
            f"{statistics.median(ratios):.2f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            f"{num_tokens / num_steps:.1f}",
            f"{acceptance_rate:.0%}",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Prints a table for each number of concurrent streams."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: the embedded model, padded)")
    parser.add_argument("--text", type=Path, help="file that prompts are taken from (default: a module of Python's)")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 2, 4, 8], help="at once (default: 1 2 4 8)")
    parser.add_argument("--max-tokens", type=positive, default=256, help="of each answer (default: 256)")
    parser.add_argument("--drafts", choices=("int4", "mtp"), default="mtp", help="what drafts (default: the MTP head)")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="of the weights")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES, help="(default: 0 and 0.7)")
    parser.add_argument("--drafts-only", action="store_true", help="have no prompt lookup beside these drafts")
    parser.add_argument(
        "--against-none", action="store_true", help="compare with no drafts at all, not even prompt lookup"
    )
    parser.add_argument("--random-weights", action="store_true", help="of the padded model, which then drafts badly")
    parser.add_argument("--rounds", type=positive, default=5, help="measured, after one that is not (default: 5)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 100)
    with tempfile.TemporaryDirectory() as directory:
        if options.model is None:
            save_padded_model(EMBEDDED, Path(directory), head=MTP_HEAD)
            if options.random_weights:
                randomize(Path(directory))
        source = str(options.model or directory)
        length = PROMPT_TOKENS + options.max_tokens
        drafting = NoPromptLookup if options.drafts_only else PromptLookup
        plain = NoPromptLookup if options.against_none else drafting
        engines = load(source, options.drafts, length, (plain, drafting), options.quantization)
        text = (options.text or Path(inspect.getfile(argparse))).read_text(encoding="utf-8")
        token_ids = Tokenizer.from_pretrained(source).encode(text)
        for count in options.streams:
            console.print(f"{count} at once")
            console.print(compare(engines, prompts_of(token_ids, count), options))
    return 0


if __name__ == "__main__":
    exit_with(main)
