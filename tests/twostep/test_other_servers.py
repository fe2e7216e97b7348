"""twostep run and chat with a server that is another program's: it wants to be told the model, and may have several."""

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from twostep.cli import main

Capture = pytest.CaptureFixture[str]
ANSWER = [{"choices": [{"delta": {"content": "Hi"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]


class Handler(BaseHTTPRequestHandler):
    """Lists models, and answers with events that have no space behind their colon."""

    def do_GET(self) -> None:  # the name that http.server looks for
        self._answer(json.dumps({"data": [{"id": name} for name in self.server.models]}))  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body))  # type: ignore[attr-defined]
        self._answer("".join(f"data:{json.dumps(event)}\n\n" for event in ANSWER) + "data:[DONE]\n\n")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Writes nothing: stderr is what the command says."""


class OtherServer(ThreadingHTTPServer):
    models = ("one", "two")

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def other() -> Iterator[OtherServer]:
    with OtherServer() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("flags", "asked"), [((), "one"), (("--model-name", "two"), "two")])
@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_run_says_which_model_it_asks(
    other: OtherServer, flags: tuple[str, ...], asked: str, raw: tuple[str, ...], capsys: Capture
) -> None:
    assert main(["run", other.url, "Hello", *flags, *raw]) == 0
    assert [body["model"] for body in other.bodies] == [asked]
    assert capsys.readouterr().out == "Hi\n"


def test_chat_says_which_model_it_asks(other: OtherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", other.url, "--model-name", "two"]) == 0
    assert [body["model"] for body in other.bodies] == ["two"]


def test_a_server_without_models_is_told(other: OtherServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(OtherServer, "models", ())
    assert main(["run", other.url, "Hello"]) == 2
    assert capsys.readouterr().err == f"twostep: {other.url} has no models.\n"
