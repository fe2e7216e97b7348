"""SIGTERM under load: `python -m tests.soak.drain [TIMES] [STREAMS]`. No stream that was accepted may be lost."""

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from typing import Any

from tests.soak.client import Answer, ask
from tests.soak.server import ServerProcess, running_server

MAX_TOKENS = 200


async def load(server: ServerProcess, num_streams: int, after_s: float) -> Counter[str]:
    """Sends requests without a pause until the server is gone, and counts how they ended."""
    outcomes: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def client(number: int) -> None:
        body: dict[str, Any] = {"prompt": f"{number}", "max_tokens": MAX_TOKENS, "ignore_eos": True}
        body["stream"] = number % 4 > 0
        while not is_over.is_set():
            try:
                answer = await ask(server.port, body)
            except OSError:
                outcomes["not connected"] += 1
                return
            except IndexError:  # the port closed before the request was sent
                outcomes["closed"] += 1
                return
            outcomes[_outcome(answer, body)] += 1
            if answer is None or answer.status != 200:
                await asyncio.sleep(0.05)

    clients = [asyncio.create_task(client(number)) for number in range(num_streams)]
    await asyncio.sleep(after_s)
    start_s = time.monotonic()
    server.signal_all(signal.SIGTERM)
    code = await asyncio.to_thread(server.wait)
    print(f"exit code {code}, {time.monotonic() - start_s:.2f} s after the signal", flush=True)
    is_over.set()
    await asyncio.gather(*clients)
    outcomes["bad exit"] += code != 0
    return outcomes


def _outcome(answer: Answer | None, body: dict[str, Any]) -> str:
    if answer is None or answer.status not in (200, 503):
        return "unexpected"
    if answer.status == 503:
        return "refused"
    try:
        tokens = len(answer.events()) if body["stream"] else answer.json()["usage"]["completion_tokens"]
    except (AssertionError, ValueError):
        return "lost"
    return "whole" if tokens == MAX_TOKENS else "lost"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.drain", description=__doc__)
    parser.add_argument("times", nargs="?", type=int, default=10)
    parser.add_argument("streams", nargs="?", type=int, default=64)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    for index in range(arguments.times):
        with running_server("--shutdown-timeout", "300") as server:
            outcomes = asyncio.run(load(server, arguments.streams, after_s=1.0 + 0.37 * index))
        print(dict(outcomes), flush=True)
        total += outcomes
    lost = {name: total[name] for name in ("lost", "unexpected", "bad exit") if total[name]}
    print(f"accepted and whole: {total['whole']}; lost: {lost or 0}")
    return 1 if lost or not total["whole"] else 0


if __name__ == "__main__":
    sys.exit(main())
