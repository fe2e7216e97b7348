"""Requests of every shape, a fifth of them given up at some stage: `python -m tests.soak.churn [REQUESTS] [SEED]`.

Afterwards nothing runs, waits or holds a block; counters say what the clients saw; memory and descriptors are flat.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.resident_memory import resident_bytes
from tests.soak.client import Answer, Stage, ask
from tests.soak.server import ServerProcess, eventually, running_server

CONCURRENCY = 48
ABORTS = 0.2
NUM_ROUNDS = 20
WARM_ROUNDS = 5
MAX_GROWTH = 0.03
"""Share by which resident memory may grow, over all rounds after the warm ones."""
BAD: tuple[dict[str, Any], ...] = (
    {"prompt": ""},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "max_tokens": 10**6},
    {"prompt": [10**8]},
    {"model": "none"},
    {"prompt": "a", "model": "none"},
)


@dataclass
class Seen:
    """Counts of what the clients sent and received."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: Counter[Stage] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_heads: int = 0
    """Number of requests whose whole head was sent."""
    unseen_tokens: int = 0
    """Tokens at most that were generated for clients that hung up before they received them."""

    def add(self, answer: Answer, body: dict[str, Any]) -> None:
        self.statuses[answer.status] += 1
        if answer.status != 200:
            assert set(answer.json()) == {"error"}, answer.body
            return
        usage = answer.events()[-1]["usage"] if body.get("stream") else answer.json()["usage"]
        self.prompt_tokens += usage["prompt_tokens"]
        self.generated_tokens += usage["completion_tokens"]


def shape(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.1:
        return dict(rng.choice(BAD))
    body: dict[str, Any] = {
        "prompt": rng.choice(["def", "A list is", "Return the absolute value of", "x" * rng.randint(1, 300)]),
        "max_tokens": rng.choice([1, 2, 8, 24]),
        "n": rng.choice([1, 1, 1, 2, 3]),
    }
    if rng.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    options: list[dict[str, Any]] = [
        {"logprobs": rng.randint(0, 5)},
        {"stop": rng.choice(["e", ["the", "\n"]])},
        {"temperature": 0},
        {"echo": True},
        {"ignore_eos": True},
        {"seed": rng.randint(0, 99), "top_p": 0.9},
    ]
    for option in rng.sample(options, rng.randint(0, 3)):
        body |= option
    return body


async def play(port: int, num_requests: int, rng: random.Random, aborts: float, seen: Seen) -> None:
    room = asyncio.Semaphore(CONCURRENCY)

    async def one() -> None:
        body = shape(rng)
        leave = rng.choice(list(Stage)[:-1]) if rng.random() < aborts else Stage.END
        async with room:
            await asyncio.sleep(rng.random() * 0.01)
            answer = await ask(port, body, leave)
        seen.num_heads += leave not in (Stage.CONNECT, Stage.HEAD)
        if answer is None:
            seen.left[leave] += 1
            seen.unseen_tokens += body.get("max_tokens", 16) * body.get("n", 1)
        else:
            seen.add(answer, body)

    await asyncio.gather(*(one() for _ in range(num_requests)))


@dataclass(frozen=True)
class Sample:
    server_mib: float
    engine_mib: float
    num_fds: int


def sample(server: ServerProcess) -> Sample:
    """Waits until the server is idle and its spare engine process there, and takes a sample."""
    assert eventually(server.is_idle), "something still runs, waits or holds blocks"
    assert eventually(lambda: len(server.engine_pids) == 2), "no other process waits for the engine's death"
    mib, engine_pid = 2**20, server.engine_pid
    assert engine_pid is not None, "there is no engine"
    return Sample(server.memory_bytes() / mib, resident_bytes(engine_pid) / mib, _lasting_fds(server))


def _lasting_fds(server: ServerProcess) -> int:
    """Returns how many descriptors stay open: those of connections that clients have closed go in a moment."""
    counts = []
    for _ in range(10):
        counts.append(server.num_fds())
        time.sleep(0.05)
    return min(counts)


def delta(server: ServerProcess, before: dict[str, float], name: str) -> int:
    """Returns by how much the samples with this name, whatever their labels, advanced together."""
    now = server.metrics()
    names = [each for each in now if each.partition("{")[0] == name and "handler=/metrics" not in each]
    return int(sum(now[each] - before.get(each, 0) for each in names))


def check_counters(server: ServerProcess, before: dict[str, float], seen: Seen) -> None:
    generated = delta(server, before, "twostep_generation_tokens_total")
    assert seen.generated_tokens <= generated <= seen.generated_tokens + seen.unseen_tokens, (generated, seen)
    assert delta(server, before, "twostep_http_requests_total") == seen.num_heads
    if not seen.left:
        assert generated == seen.generated_tokens
        assert delta(server, before, "twostep_prompt_tokens_total") >= seen.prompt_tokens  # n reads a prompt n times


def check_flat(samples: list[Sample]) -> bool:
    """Prints each quantity over the rounds and returns whether all are flat."""
    settled = samples[WARM_ROUNDS:]
    rounds = range(len(settled))
    is_flat = True
    for name in ("server_mib", "engine_mib", "num_fds"):
        values = [getattr(each, name) for each in settled]
        slope = statistics.linear_regression(rounds, values).slope
        growth = slope * len(values) / max(values)
        print(f"{name:12} {values[0]:10.1f} -> {values[-1]:10.1f}   slope {slope:+.4f} a round   growth {growth:+.2%}")
        is_flat &= growth <= MAX_GROWTH
    return is_flat


def run(num_requests: int, seed: int) -> bool:
    rng = random.Random(seed)
    with running_server("--max-num-seqs", "32", "--kv-cache-memory-bytes", "32MiB") as server:  # soon all touched
        samples = []
        before, seen = server.metrics(), Seen()
        for index in range(NUM_ROUNDS):
            asyncio.run(play(server.port, num_requests // NUM_ROUNDS, rng, ABORTS, seen))
            samples.append(sample(server))
            print(f"round {index + 1:2}: {samples[-1]}", flush=True)
        print(f"{dict(seen.statuses)}; left: { ({str(stage): count for stage, count in seen.left.items()}) }")
        check_counters(server, before, seen)
        before, exact = server.metrics(), Seen()
        asyncio.run(play(server.port, num_requests // NUM_ROUNDS, rng, 0.0, exact))
        sample(server)
        check_counters(server, before, exact)
        print(f"counters are exact: {exact.generated_tokens} tokens generated and received")
        return check_flat(samples)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.churn", description=__doc__)
    parser.add_argument("requests", nargs="?", type=int, default=100_000)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    arguments = parser.parse_args()
    return 0 if run(arguments.requests, arguments.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
