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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "localhost:8000", "Hi"], "localhost:8000 looks like a server's address: write http://localhost:8000."),
        (["chat", "10.0.0.1:8000/v1"], "write http://10.0.0.1:8000/v1."),
        (["run", "http://[::1", "Hi"], "http://[::1 is no URL"),
        (["run", "HTTP://127.0.0.1:1", "Hi"], "Connection refused"),
    ],
)
def test_what_is_no_address_is_told_in_one_sentence(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_key_that_no_header_holds_is_refused_and_not_told(
    other: OtherServer, key: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("TWOSTEP_API_KEY", key)
    assert main(["run", other.url, "Hi"]) == 2
    told = capsys.readouterr().err
    assert "TWOSTEP_API_KEY is no key" in told and key not in told


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as locales set them
@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_text_that_is_not_utf8_is_the_texts_fault(
    other: OtherServer, command: str, errors: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    main([command, other.url])
    assert "The text is not in UTF-8" in capsys.readouterr().err
    assert other.bodies == []
