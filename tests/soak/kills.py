"""Kills the engine at random moments while streams run, compares every token with an undisturbed run, and counts those
that were computed again.

    python -m tests.soak.kills --streams 200 --kills 20 --ranks 2

With several ranks, any of them is killed. Starts a server of its own with the embedded model, unless told another. The
exit code is 0 if all streams completed with equal tokens, if the server's counters agree, and if one rank computed no
more again than each stream's last, unfinished block, or step of the grid on which recurrent states are kept.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from tests.soak.server import ServerProcess, eventually, running_server

BLOCK_SIZE = 16
PROMPTS = ("The list of", "def main(", "A module that", "Return the absolute path", "import os\n")


@dataclass(frozen=True)
class Answer:
    """The content of a stream, without its times."""

    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: str | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def body_of(index: int, max_tokens: int) -> dict[str, Any]:
    """Returns a request: half of them are greedy, half sampled; some have penalties, logprobs or a stop string."""
    how: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 1.1, "top_p": 0.95, "seed": index}
    if index % 5 == 0:
        how |= {"presence_penalty": 0.8, "repetition_penalty": 1.1}
    if index % 7 == 0:
        how |= {"stop": ["return"], "logprobs": 2}
    return {
        "prompt": f"{index}: {PROMPTS[index % len(PROMPTS)]} " * (1 + index % 6 + 40 * (index % 4 == 0)),
        "max_tokens": max_tokens - index % 17,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **how,
    }


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Runs a stream to its end. Raises AssertionError if it is not complete."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert response.status_code == 200, f"status {response.status_code}"
    assert lines and lines[-1] == "data: [DONE]", f"the stream ends with {lines[-1:]}"
    return answer_of([json.loads(line.removeprefix("data: ")) for line in lines[:-1]])


def answer_of(events: list[dict[str, Any]]) -> Answer:
    """Returns what a stream's events say. Raises AssertionError if they are not a complete answer."""
    assert all("error" not in event for event in events), f"the stream ends with {events[-1]}"
    choices = [choice for event in events for choice in event["choices"]]
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    num_used = events[-1]["usage"]["completion_tokens"]
    assert num_used == len(token_ids), f"usage tells {num_used} tokens, {len(token_ids)} came"
    scores = [score for choice in choices if choice["logprobs"] for score in choice["logprobs"]["token_logprobs"]]
    return Answer(token_ids, "".join(choice["text"] for choice in choices), scores, choices[-1]["finish_reason"])


async def kill_at_random(server: ServerProcess, num_kills: int, mean_s: float, chance: random.Random) -> int:
    """Kills the engine, or another of its ranks, at random moments, whatever it does then: load, prefill, decode, or
    nothing. Returns how many were loading as the one before was, after which nothing is kept of what was computed."""
    was_loading, num_emptied = False, 0
    while num_kills:
        await asyncio.sleep(chance.expovariate(1 / mean_s))
        if server.engine_pid is not None:
            is_loading = httpx.get(f"{server.url}/ready").status_code != 200
            num_emptied += is_loading and was_loading
            was_loading = is_loading
            os.kill(chance.choice([server.engine_pid, *server.rank_pids]), signal.SIGKILL)
            num_kills -= 1
    return num_emptied


class Counted(Protocol):
    """What a stream answered: equal to what it answers undisturbed."""

    @property
    def num_tokens(self) -> int: ...


async def disturbed(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    answers: Sequence[Counted],
    killer: "asyncio.Task[Any]",
    run: Callable[[httpx.AsyncClient, dict[str, Any]], Awaitable[Counted]] = stream,
) -> tuple[list[str], int, int]:
    """Runs every stream at least once, and again until the last kill. Returns the problems and the numbers of streams
    and of tokens."""
    problems: list[str] = []
    num_streams = num_tokens = 0

    async def repeat(index: int) -> None:
        nonlocal num_streams, num_tokens
        while True:
            num_streams += 1
            try:
                answer = await run(client, bodies[index])
                num_tokens += answer.num_tokens
                if answer != answers[index]:
                    problems.append(f"stream {index}: not the undisturbed answer")
            except (AssertionError, httpx.HTTPError) as error:
                problems.append(f"stream {index}: {error!r}")
                await asyncio.sleep(1.0)
            if killer.done():
                return

    await asyncio.gather(*(repeat(index) for index in range(len(bodies))))
    return problems, num_streams, num_tokens


def computed_again(server: ServerProcess, before: dict[str, float], most: int) -> list[str]:
    """Returns a problem if more tokens than these were computed of prompts, and of what was generated before kills."""
    now = server.metrics()
    names = "twostep_prefix_cache_queries_total", "twostep_prefix_cache_hits_total"
    queries, hits = (now[name] - before[name] for name in names)
    print(f"{queries:.0f} tokens looked up, {queries - hits:.0f} of them computed", flush=True)
    return [f"{queries - hits:.0f} tokens were computed again, more than {most}"] if queries - hits > most else []


def wrong_number_of_restarts(server: ServerProcess, num_kills: int, has_spare: bool) -> list[str]:
    """Returns what is wrong with the number of restarts: one for each kill, but for those that hit a process which
    waited for the death of the engine, and had not taken its place yet."""
    now = server.metrics()["twostep_engine_restarts_total"]
    fewest = 1 if has_spare else num_kills
    return [] if fewest <= now <= num_kills else [f"the engine was restarted {now:.0f} times, killed {num_kills} times"]


def wrong_counters(server: ServerProcess, expected: dict[str, float]) -> list[str]:
    """Returns the counters that are not what they should be."""
    now = server.metrics()
    return [f"{name} is {now[name]}, not {value}" for name, value in expected.items() if now[name] != value]


async def soak(arguments: argparse.Namespace) -> list[str]:
    """Runs the undisturbed and the disturbed streams and returns the problems."""
    bodies = [body_of(index, arguments.max_tokens) for index in range(arguments.streams)]
    flags = {
        "--max-waiting": len(bodies),
        "--max-queue-time": 3600,
        "--max-engine-restarts": arguments.kills,
        "--tensor-parallel-size": arguments.ranks,
    }
    spare = "--spare-engine" if arguments.spare_engine else "--no-spare-engine"
    model = [arguments.model] if arguments.model else []
    with running_server(*(str(part) for flag in flags.items() for part in flag), spare, *model) as server:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
            answers = await asyncio.gather(*(stream(client, body) for body in bodies))
            num_before = sum(len(answer.token_ids) for answer in answers)
            print(f"undisturbed: {len(answers)} streams, {num_before} tokens", flush=True)
            before, started_s = server.metrics(), time.monotonic()
            chance = random.Random(arguments.seed)
            killer = asyncio.create_task(kill_at_random(server, arguments.kills, arguments.mean_seconds, chance))
            problems, num_streams, num_tokens = await disturbed(client, bodies, answers, killer)
            num_known = int(before["twostep_prefix_cache_queries_total"]) + num_before
            num_forgotten = num_known * (await killer if arguments.ranks == 1 else arguments.kills)
            num_unfinished = num_streams + arguments.kills * arguments.streams
            problems += computed_again(server, before, num_forgotten + arguments.grid * num_unfinished)
            print(f"{arguments.kills} kills in {time.monotonic() - started_s:.0f} s: {num_tokens} tokens", flush=True)
        if not eventually(server.is_idle):
            problems.append("requests or blocks are left behind")
        problems += wrong_number_of_restarts(server, arguments.kills, arguments.spare_engine)
        return problems + wrong_counters(server, {"twostep_generation_tokens_total": num_before + num_tokens})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="checkpoint with a tokenizer (default: the embedded model)")
    parser.add_argument("--grid", type=int, default=BLOCK_SIZE, help="tokens: 512 for models with recurrent states")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1, help="processes that compute the model")
    parser.add_argument("--spare-engine", action=argparse.BooleanOptionalAction, default=True, help="as the server's")
    parser.add_argument("--max-tokens", type=int, default=400, help="of the longest stream")
    parser.add_argument("--mean-seconds", type=float, default=4.0, help="between two kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    problems = asyncio.run(soak(parser.parse_args()))
    print("\n".join(problems) or "every stream complete, every token equal, every counter right")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
