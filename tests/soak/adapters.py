"""Loads and unloads adapters while these and others have streams: `python -m tests.soak.adapters [ROUNDS] [SEED]`.

The same few names come back with other content, and are unloaded in the midst of their streams. The exit code is 0 if
every stream has the tokens and log-probabilities of a server that nothing happens to; if memory and descriptors are
flat; and if at the end nothing runs or holds a block, and as many adapters can be loaded as at the start.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from engine import embedded_model
from tests.engine.tiny_adapters import make_adapter
from tests.engine.tiny_models import load_reference
from tests.soak.churn import WARM_ROUNDS, Sample, check_flat, sample
from tests.soak.server import ServerProcess, eventually, running_server

EMBEDDED = Path(next(iter(embedded_model.__path__)))
TARGETS = ["q_proj", "v_proj", "down_proj"]
NUM_CONTENTS = 9  # all guests may stay while those before them are being freed
NUM_STEADY = 3  # contents of the adapters that stay
NUM_GUESTS = 3  # names that come and go
NUM_PROMPTS = 4
NUM_STAYS = 4  # of each guest in a round


@dataclass(frozen=True)
class Stream:
    """One stream's content, which nothing that happens to adapters may change."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


Expected = dict[tuple[int, int], Stream]
"""The stream of each content and prompt."""


def ask(server: ServerProcess, model: str, prompt: int, begun: Callable[[], None] = lambda: None) -> Stream:
    """Returns a whole stream; calls `begun` once the first token is there."""
    body = {"model": model, "prompt": [7, *range(20, 100), 30 + prompt], "max_tokens": 24 + prompt, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    token_ids: list[int] = []
    logprobs: list[float] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for choice in _choices(answer):
            if not token_ids:
                begun()
            token_ids += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
    return Stream(tuple(token_ids), tuple(logprobs))


def _choices(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        event = line.removeprefix("data: ")
        if event and event != "[DONE]":
            yield from (choice for choice in json.loads(event)["choices"] if choice.get("token_ids"))


def load(server: ServerProcess, name: str, path: Path) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}, timeout=60
    )


def unload(server: ServerProcess, name: str) -> None:
    answer = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)
    assert answer.status_code == 200, answer.text


@dataclass(frozen=True)
class Soak:
    """Adapters on a server, of which some stay and others come and go."""

    server: ServerProcess
    paths: list[Path]
    expected: Expected

    def play(self, seed: str) -> list[str]:
        """Has all guests and the streams of those that stay, at once; returns the problems."""
        with ThreadPoolExecutor(2 * NUM_GUESTS) as pool:
            guests = [pool.submit(self._stay_often, f"guest{index}", f"{seed} {index}") for index in range(NUM_GUESTS)]
            steady = [pool.submit(self._ask_all, index) for index in range(NUM_STEADY)]
            return [problem for each in (*guests, *steady) for problem in each.result()]

    def _stay_often(self, name: str, seed: str) -> list[str]:
        chance, problems = random.Random(seed), []
        for _ in range(NUM_STAYS):
            content, prompt = chance.randrange(NUM_CONTENTS), chance.randrange(NUM_PROMPTS)
            answer = load(self.server, name, self.paths[content])
            assert answer.status_code == 200, answer.text
            stream = ask(self.server, name, prompt, lambda: unload(self.server, name))
            problems += self._compared(name, content, prompt, stream)
        return problems

    def _ask_all(self, index: int) -> list[str]:
        streams = [(prompt, ask(self.server, f"steady{index}", prompt)) for prompt in range(NUM_PROMPTS)]
        return [each for prompt, own in streams for each in self._compared(f"steady{index}", index, prompt, own)]

    def _compared(self, name: str, content: int, prompt: int, stream: Stream) -> list[str]:
        is_equal = stream == self.expected[content, prompt]
        return [] if is_equal else [f"{name} with content {content}, prompt {prompt}: another answer"]

    def kept(self) -> list[str]:
        """Returns a problem unless all adapters that may be loaded can be, at the end."""
        free = range(NUM_STEADY, NUM_CONTENTS)
        if all(self._loads(f"last{at}", self.paths[at]) for at in free):
            return []
        return [f"an adapter is kept: {NUM_CONTENTS} cannot be loaded at once"]

    def _loads(self, name: str, path: Path) -> bool:
        return eventually(lambda: load(self.server, name, path).is_success, within_s=10)


def undisturbed(paths: list[Path]) -> Expected:
    """Returns the streams of a server that has each adapter from the start, one stream at a time, without a cache."""
    flags = [flag for index, path in enumerate(paths) for flag in ("--lora", f"a{index}={path}")]
    with running_server(*flags, "--no-enable-prefix-caching") as server:
        pairs = product(range(NUM_CONTENTS), range(NUM_PROMPTS))
        return {(content, prompt): ask(server, f"a{content}", prompt) for content, prompt in pairs}


def run(num_rounds: int, seed: int, folder: Path) -> tuple[list[Sample], list[str]]:
    """Returns a sample after each round, and the problems."""
    model = load_reference(EMBEDDED)
    paths = [make_adapter(folder / f"{at}", model, at, 0.05, target_modules=TARGETS) for at in range(NUM_CONTENTS)]
    expected = undisturbed(paths)
    assert len(set(expected.values())) == len(expected), "contents do not differ"
    flags = [flag for at in range(NUM_STEADY) for flag in ("--lora", f"steady{at}={paths[at]}")]
    flags += ["--allow-runtime-lora-updating", "--max-loras", str(NUM_CONTENTS), "--kv-cache-memory-bytes", "32MiB"]
    samples, problems = [], []
    with running_server(*flags) as server:
        soak = Soak(server, paths, expected)
        for index in range(num_rounds):
            problems += soak.play(f"{seed} {index}")
            samples.append(sample(server))
        return samples, problems + soak.kept()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.adapters", description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=200)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.rounds < WARM_ROUNDS + 2:
        parser.error(f"at least {WARM_ROUNDS + 2} rounds: the first {WARM_ROUNDS} only warm up")
    with tempfile.TemporaryDirectory(prefix="twostep-adapters-") as folder:
        samples, problems = run(arguments.rounds, arguments.seed, Path(folder))
    print("\n".join(problems) or f"every stream equal, {arguments.rounds * NUM_GUESTS * NUM_STAYS} adapters loaded")
    return 0 if check_flat(samples) and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
