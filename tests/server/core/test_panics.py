"""A panic of a library in Rust is answered in JSON and stands in the access log, as any error does."""

import logging

import pytest

from engine.core.errors import RequestError
from engine.text.tokenizer import Tokenizer
from tests.server.byte_tokenizer import ByteTokenizer
from tests.server.live_server import LiveServer


class PanicException(BaseException):
    """As pyo3's, which nothing exports."""


def panic(*_: object, **__: object) -> None:
    raise PanicException("called `Result::unwrap()` on an `Err` value")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_it_is_an_internal_error(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    monkeypatch.setattr(ByteTokenizer, "encode", panic)
    with caplog.at_level(logging.INFO):
        answer = server.post_json(path, {"prompt": "Hi"})
        server.wait_until_idle()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert f"POST {path} 500" in caplog.text and "Result::unwrap()" in caplog.text


class PanickingBackend:
    encode_batch_fast = staticmethod(panic)


def test_of_the_tokenizer_it_is_the_texts_fault() -> None:
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer._backend, tokenizer.max_tokens = PanickingBackend(), None  # type: ignore[assignment]
    with pytest.raises(RequestError, match="cannot cut a text of this kind or length into tokens"):
        tokenizer.encode("Hi")
