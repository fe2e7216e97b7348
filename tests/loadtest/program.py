"""Helpers that run the program in this process, with few and short requests."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from loadtest.cli import main
from tests.loadtest.fake_server import FakeServer

Capture = pytest.CaptureFixture[str]

QUICK = ("--max-tokens", "4", "--prompt-len", "3", "--requests", "6", "--concurrency", "2", "--quiet")


class Run:
    """One run of the program: its exit code, what it printed, and the document in its last line."""

    def __init__(self, capsys: Capture, *arguments: str) -> None:
        self.code = main(["--json", "-", *arguments])
        self.out, self.err = capsys.readouterr()

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def group(self) -> dict[str, Any]:
        found: dict[str, Any] = self.document["urls"][0]["groups"]["all"]
        return found


def after_requests(fake: FakeServer, num: int, act: Callable[[], object]) -> None:
    """Calls `act` in a thread once the server has received `num` requests."""

    def watch() -> None:
        while len(fake.bodies) < num:
            time.sleep(0.01)
        act()

    threading.Thread(target=watch, daemon=True).start()
