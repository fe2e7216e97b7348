"""What the KV store is worth: the first token of a long prompt, and the gaps of streams beside its reads and writes.

The engine runs alone, without HTTP. A prompt is computed, found in memory, read from the store after memory forgot it,
and read as the first one of another engine. Then streams decode while prompts arrive one after the other, which are
computed, with and without a store that is written to, or found, on disk or in memory. Without --model it is a model of
random weights in the shape of Qwen2.5-0.5B with 32,000 tokens: 0.39 B parameters.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.command import exit_with
from engine.assembly import load_engine
from engine.core.config import EngineConfig
from engine.core.generation_request import GenerationRequest
from engine.core.messages import AddRequest
from engine.core.sampling_params import SamplingParams
from engine.core.stats import nearest_rank
from loadtest.numbers import positive

SHAPE = {
    **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 32_000, "hidden_size": 896},
    **{"intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    **{"max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
}
NUM_STREAMS = 4
STREAM_PROMPT = 32  # tokens
STREAM_TOKENS = 1024  # more than are generated before the last prompt has ended
STEPS_EACH = 20  # of the streams, at least, from one prompt to the next


class Bench:
    """An engine, and requests with numbers."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = load_engine(config)
        self._names = map(str, itertools.count())

    def first_token_s(self, prompt: list[int]) -> float:
        """Returns how long a prompt takes to its first token; then waits until its blocks are stored."""
        started_s, name = time.perf_counter(), self._add(prompt, 1)
        while name not in self._step():
            pass
        seconds = time.perf_counter() - started_s
        self._settle()
        return seconds

    def forget(self) -> None:
        """Empties memory; what is in the store stays there."""
        self._engine.reset_prefix_cache(clears_store=False)

    def gaps_s(self, prompts: Sequence[list[int]], before_each: Callable[[], None]) -> list[float]:
        """Returns the gaps of streams that decode while the prompts come, each after the one before it."""
        texts = [[*range(index, index + STREAM_PROMPT)] for index in range(NUM_STREAMS)]
        streams, gaps = {self._add(text, STREAM_TOKENS) for text in texts}, list[float]()
        last_s: dict[str, float] = {}
        while last_s.keys() != streams:
            last_s |= dict.fromkeys(self._step() & streams, time.perf_counter())
        for prompt in prompts:
            before_each()
            name, num_steps, is_waiting = self._add(prompt, 1), 0, True
            while is_waiting or num_steps < STEPS_EACH:
                updated, now_s = self._step(), time.perf_counter()
                is_waiting, num_steps = is_waiting and name not in updated, num_steps + 1
                gaps += [now_s - last_s[each] for each in updated & streams]
                last_s |= dict.fromkeys(updated & streams, now_s)
        self._engine.abort_requests(streams)
        self._settle()
        return gaps

    def close(self) -> None:
        self._engine.close()

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        asked = GenerationRequest(prompt_token_ids=prompt, params=params, arrival_s=0.0)
        name = next(self._names)
        self._engine.add_request(AddRequest(request_id=name, asked=asked))
        return name

    def _step(self) -> set[str]:
        """Returns the requests that got tokens."""
        return {update.request_id for update in self._engine.step().updates}

    def _settle(self) -> None:
        while self._engine.has_work:
            self._engine.step()


@contextmanager
def engine_of(options: argparse.Namespace, model: Path, store: Path | None) -> Iterator[Bench]:
    config = EngineConfig(
        model=str(options.model or model),
        load_format="auto" if options.model else "dummy",
        max_model_len=options.tokens + STREAM_PROMPT + STREAM_TOKENS,
        kv_store=None if store is None else str(store),
        num_speculative_tokens=0,
    )
    bench = Bench(config)
    try:
        yield bench
    finally:
        bench.close()


def first_tokens(options: argparse.Namespace, directory: Path, prompts: Sequence[list[int]]) -> Table:
    """Returns a table of the first token's time, each as a part of what the same prompt takes that is computed."""
    ratios: dict[str, list[float]] = {"in memory": [], "in the store": [], "in the store, after a restart": []}
    computed_s = []
    for index, prompt in enumerate(prompts):
        store = directory / str(index)
        with engine_of(options, directory, store) as bench:
            bench.first_token_s([*range(2 * STREAM_PROMPT)])  # what a process does once
            computed_s.append(bench.first_token_s(prompt))
            ratios["in memory"].append(bench.first_token_s(prompt) / computed_s[-1])
            bench.forget()
            ratios["in the store"].append(bench.first_token_s(prompt) / computed_s[-1])
        with engine_of(options, directory, store) as bench:
            ratios["in the store, after a restart"].append(bench.first_token_s(prompt) / computed_s[-1])
    table = Table("found", "TTFT, ms", "of a computed prompt's")
    table.add_row("nowhere", f"{1000 * statistics.median(computed_s):.0f}", "1")
    for place, each in ratios.items():
        ratio = statistics.median(each)
        table.add_row(place, f"{1000 * ratio * statistics.median(computed_s):.0f}", f"1/{1 / ratio:.0f}")
    return table


def gaps(options: argparse.Namespace, directory: Path, prompts: Sequence[list[int]]) -> Table:
    """Returns a table of gaps beside writes, reads, and the same prompts without either."""
    with engine_of(options, directory, None) as bench:
        found = {"computed, no store": bench.gaps_s(prompts, lambda: None)}
    with engine_of(options, directory, directory / "gaps") as bench:
        found["computed and written"] = bench.gaps_s(prompts, lambda: None)
        found["found in memory"] = bench.gaps_s(prompts, lambda: None)
        found["read from the store"] = bench.gaps_s(prompts, bench.forget)
    table = Table("prompts", "ITL p50, ms", "p99", "gaps")
    for kind, each in found.items():
        p50, p99 = (1000 * nearest_rank(sorted(each), percent) for percent in (50, 99))
        table.add_row(kind, f"{p50:.1f}", f"{p99:.1f}", str(len(each)))
    return table


def main(arguments: list[str] | None = None) -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_store", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: random weights, 0.39 B)")
    parser.add_argument("--tokens", type=positive, default=4000, help="of a prompt (default: 4000)")
    parser.add_argument("--prompts", type=positive, default=3, help="of each kind (default: 3)")
    parser.add_argument("--only", choices=("first-tokens", "gaps"), help="one table (default: both)")
    options = parser.parse_args(arguments)
    console, rng = Console(width=None if sys.stdout.isatty() else 120), random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        for kind, measure in {"first-tokens": first_tokens, "gaps": gaps}.items():
            prompts = [[rng.randrange(1000) for _ in range(options.tokens)] for _ in range(options.prompts)]
            if options.only in (None, kind):
                console.print(measure(options, directory, prompts))
    return 0


if __name__ == "__main__":
    exit_with(main)
