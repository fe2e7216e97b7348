"""Stopping a server as service managers and terminals do it: real processes, real signals."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.events import chunks_of, error_of
from tests.soak.server import ROOT, SETTLE_S, ServerProcess, eventually, running_server

SHORT = 1200  # tokens: long enough to be caught half-way
LONG, MANY = 1900, 8  # tokens of so many sequences: several seconds, however fast the machine
PATIENT = ("--shutdown-timeout", "200")  # for machines that are busy


def ask(server: ServerProcess, max_tokens: int, stream: bool, n: int = 1) -> httpx.Response:
    body = {"prompt": "Return the", "max_tokens": max_tokens, "stream": stream, "n": n, "ignore_eos": True}
    body["return_token_ids"] = True
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=SETTLE_S)


def num_streamed(response: httpx.Response) -> int:
    """Returns the number of tokens in a stream, whose events have the tokens of a step each."""
    return sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks_of(response))


def is_running(server: ServerProcess, count: int) -> Callable[[], bool]:
    return lambda: server.metrics()["twostep_requests_running"] == count


@contextmanager
def asked(server: ServerProcess, max_tokens: int, *kinds: bool, n: int = 1) -> Any:
    """Runs requests for `n` sequences each, streamed or not; they are in the engine when the context begins."""
    with ThreadPoolExecutor(len(kinds)) as pool:
        answers: list[Future[httpx.Response]] = [pool.submit(ask, server, max_tokens, kind, n) for kind in kinds]
        assert eventually(is_running(server, n * len(kinds)))
        yield answers


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_what_runs_ends_whole_though_every_process_was_signalled(number: int) -> None:
    with running_server(*PATIENT) as server, socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.sendall(b"HEAD /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")  # its answer is a head only: one read
        assert idle.recv(4096).startswith(b"HTTP/1.1 404")
        with asked(server, SHORT, True, True, False) as answers:
            server.signal_all(number)
            assert [num_streamed(answer.result()) for answer in answers[:2]] == [SHORT, SHORT]
            assert answers[2].result().json()["usage"]["completion_tokens"] == SHORT
        assert server.wait() == 0
        assert idle.recv(4096) == b""  # the idle connection held nothing up: it was closed


@pytest.mark.slow
def test_an_engine_that_dies_while_streams_end_is_restarted_for_them() -> None:
    with running_server(*PATIENT) as server:
        with asked(server, SHORT, True, False) as (streamed, whole):
            engine_pid = server.engine_pid
            assert engine_pid is not None
            server.signal(signal.SIGTERM)
            os.kill(engine_pid, signal.SIGKILL)
            assert num_streamed(streamed.result()) == SHORT
            assert whole.result().json()["usage"]["completion_tokens"] == SHORT
        assert server.wait() == 0


@pytest.mark.slow
def test_what_outlasts_the_time_gets_an_error_and_new_work_is_refused() -> None:
    with running_server("--shutdown-timeout", "2") as server:
        with asked(server, LONG, True, False, n=MANY) as (streamed, whole):
            server.signal_all(signal.SIGTERM)
            assert eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            refused = ask(server, 1, stream=False)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert chunks_of(streamed.result())[-1]["error"]["code"] == "server_is_overloaded"
            assert whole.result().status_code == 503
            assert error_of(whole.result())["code"] == "server_is_overloaded"
        assert server.wait() == 0


@pytest.mark.slow
def test_the_second_signal_ends_at_once() -> None:
    with running_server("--shutdown-timeout", "1000") as server:
        with asked(server, LONG, True, False, n=MANY) as (streamed, whole):
            server.signal(signal.SIGINT)
            assert eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            server.signal(signal.SIGINT)
            assert chunks_of(streamed.result())[-1]["error"]["code"] == "server_is_overloaded"
            assert whole.result().status_code == 503
        assert server.wait() == 0


def test_a_signal_while_loading_ends_without_a_fuss() -> None:
    command = [sys.executable, "-m", "server", "serve", "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()  # the port is open, the model is being loaded
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SETTLE_S)
    assert (process.returncode, "Traceback" in errors) == (0, False), errors


def test_a_signal_before_there_is_a_server_ends_it_like_ctrl_c() -> None:
    script = (
        "import signal, sys; from server import cli\n"
        "cli.read_settings = lambda flags: signal.raise_signal(signal.SIGTERM)\n"
        "sys.exit(cli.main(['serve']))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=SETTLE_S).returncode == 0
