"""Runs whole comparisons for tests: writes a file of servers, calls the program's main, and reads its results."""

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.cli import main

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--", "--requests", "4", "--max-tokens", "3", "--prompt-len", "5", "--warmup", "1")
ALL = ("a", "b")


class Bench:
    """A file of servers in a directory of its own, with the program's document and the notes of the servers."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str], **habits: str) -> None:
        self.home, self._capsys = home, capsys
        entries = (self._entry(name, f"peer ${{PORT}} {home}/{name} {habits[name]}") for name in habits)
        self.file = home / "servers.toml"
        self.file.write_text('scenarios = ["S1", "S2"]\n' + "".join(entries))

    @staticmethod
    def _entry(name: str, words: str) -> str:
        command = f"${{PYTHON}} -m tests.benchmarks.{words}"
        environment = f'{{ PYTHONPATH = "{ROOT}" }}'
        return (
            f'[[server]]\nname = "{name}"\ncommand = "{command}"\nenvironment = {environment}\nstart_timeout_s = 30\n'
        )

    def add(self, text: str) -> None:
        self.file.write_text(self.file.read_text() + text)

    def run(self, *arguments: str, load: tuple[str, ...] = QUICK) -> int:
        code = main([str(self.file), "--json", str(self.home / "document.json"), *arguments, *load])
        self.out, self.err = self._capsys.readouterr()
        return code

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / "document.json").read_text())
        return found

    def runs(self, name: str) -> dict[tuple[int, str], dict[str, Any]]:
        (server,) = (server for server in self.document["servers"] if server["name"] == name)
        return {(run["round"], run["scenario"]): run for run in server["runs"]}

    def notes(self, name: str) -> str:
        path = self.home / name
        return path.read_text() if path.exists() else ""

    def pids(self, name: str) -> list[int]:
        return [int(pid) for pid in re.findall(r"started (\d+)", self.notes(name))]


def has_ended(pid: int) -> bool:
    """Whether the process has ended, or does so soon: one that was killed may still be at it. A zombie has ended: its
    parent may be a container's init, which never waits for it."""
    deadline_s = time.monotonic() + 5
    while not (is_gone := _is_gone(pid)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_gone


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def when(condition: Callable[[], object], act: Callable[[], object]) -> None:
    """Calls `act` in a thread as soon as `condition` holds."""

    def watch() -> None:
        while not condition():
            time.sleep(0.01)
        act()

    threading.Thread(target=watch, daemon=True).start()


Capture = pytest.CaptureFixture[str]
