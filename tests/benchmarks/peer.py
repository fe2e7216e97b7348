"""A server process for tests: tests/loadtest/fake_server.py on a given port, which can misbehave in several ways.

`python -m tests.benchmarks.peer PORT NOTES [HABIT ...]` appends what it does to the file NOTES, a line each.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.loadtest.fake_server import FakeServer

_NUM_BEFORE_CRASH = 8
_NUM_REFUSED = 3


class Peer(FakeServer):
    """A fake server that notes each request, and crashes at one if that is among its habits."""

    def __init__(self, notes: Path, habits: set[str]) -> None:
        super().__init__(
            gap_s=3600 if "hangs" in habits else 0.001,
            sends_metrics=False,
            num_rejections=_NUM_REFUSED if "refuses" in habits else 0,
            extra_completion_tokens=-1 if "stops_early" in habits else 0,
        )
        self.notes, self.habits = notes, habits

    def note(self, text: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{text}\n")

    async def _complete(self, writer, path, body):  # type: ignore[no-untyped-def]
        self.note(f"prompt {body['prompt']}")
        if "dies" in self.habits and len(self.bodies) > _NUM_BEFORE_CRASH:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super()._complete(writer, path, body)


async def serve(port: int, peer: Peer) -> None:
    server = await asyncio.start_server(peer.answer, "127.0.0.1", port)
    peer.note(f"started {os.getpid()}")
    async with server:
        await server.serve_forever()


def shut_down_slowly(peer: Peer) -> None:
    time.sleep(0.5)
    peer.note("cleaned up")
    os._exit(0)


def main() -> None:
    port, notes, habits = int(sys.argv[1]), Path(sys.argv[2]), set(sys.argv[3:])
    peer = Peer(notes, habits)
    if "stubborn" in habits:
        signal.signal(signal.SIGTERM, lambda *_: peer.note("asked to end"))
    if "tidy" in habits:
        signal.signal(signal.SIGTERM, lambda *_: shut_down_slowly(peer))
    if "parent" in habits:
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        peer.note(f"started {child.pid}")
    asyncio.run(serve(port, peer))


if __name__ == "__main__":
    main()
