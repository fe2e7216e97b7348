"""What systemd is told: a socket stands in for it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.service_manager import keep_alive, notify, watchdog_s

FAKE_PROGRAM = str(Path(__file__).parent / "fake_program.py")


@contextmanager
def listening(address: str) -> Generator[socket.socket, None, None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address.replace("@", "\0", 1))
        manager.settimeout(60)
        yield manager


@pytest.mark.parametrize("is_abstract", [False, True])
def test_messages_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool) -> None:
    address = f"@twostep-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with listening(address) as manager:
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"


def test_without_it_nothing_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    assert caplog.text == ""
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    notify("READY=1")
    assert "was not told READY=1" in caplog.text


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("500000", None, 0.5),
        ("500000", "its own", 0.5),
        ("500000", "1", None),
        ("", None, None),
        ("0", None, None),
    ],
)
def test_it_says_how_often_it_wants_to_hear(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str | None, seconds: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "its own" else pid)
    assert watchdog_s() == seconds


def test_it_hears_of_a_process_while_that_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "2000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    health = iter([True, False, False, True])

    async def run() -> None:
        with pytest.raises(StopIteration):
            try:
                await keep_alive(lambda: next(health))
            except RuntimeError as error:  # a coroutine lets no StopIteration out
                raise error.__cause__ or error from None

    with listening(str(tmp_path / "notify")) as manager:
        asyncio.run(run())
        manager.setblocking(False)
        assert [manager.recv(100), manager.recv(100)] == [b"WATCHDOG=1"] * 2
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_nobody_is_told_where_nobody_wants_to_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    asyncio.run(asyncio.wait_for(keep_alive(lambda: True), 10))


def test_a_server_tells_that_it_is_ready_lives_and_stops(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    environment = os.environ | {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000"}
    environment.pop("WATCHDOG_PID", None)
    with listening(address) as manager:
        process = subprocess.Popen([sys.executable, FAKE_PROGRAM, "ready"], env=environment, stdout=subprocess.DEVNULL)
        heard: list[bytes] = []
        while b"READY=1" not in heard:
            heard.append(manager.recv(100))
        while heard[-1] != b"WATCHDOG=1":
            heard.append(manager.recv(100))
        assert b"STOPPING=1" not in heard
        process.send_signal(signal.SIGTERM)
        while heard[-1] != b"STOPPING=1":
            heard.append(manager.recv(100))
        assert process.wait(60) == 0
        assert heard.count(b"READY=1") == 1


def test_a_server_that_cannot_load_never_says_that_it_is_ready(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with listening(address) as manager:
        environment = os.environ | {"NOTIFY_SOCKET": address}
        result = subprocess.run([sys.executable, FAKE_PROGRAM, "broken"], env=environment, capture_output=True)
        assert result.returncode == 1
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)
