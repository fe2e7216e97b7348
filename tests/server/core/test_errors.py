"""Every error has one form, with the status and the code of the table."""

import logging
from typing import Any

import pytest

from engine.core import errors as engine_errors
from engine.core.errors import (
    ConfigError,
    ContextLengthError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidParameterError,
    ModelError,
    OverloadedError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
    TwostepError,
)
from server.core import errors as server_errors
from server.core.errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    BodyTooLargeError,
    HeadTooLargeError,
    MediaTypeError,
    ModelNotFoundError,
    NotReadyError,
    RequestNotFoundError,
    RequestTooSlowError,
    kind_of,
)
from tests.server.events import chunks_of, error_of
from tests.server.live_server import LiveServer

TABLE: dict[type[Exception], tuple[int, str]] = {
    BadRequestError: (400, "invalid_request_error"),
    RequestError: (400, "invalid_request_error"),
    InvalidParameterError: (400, "invalid_request_error"),
    ContextLengthError: (400, "context_length_exceeded"),
    AuthenticationError: (401, "invalid_api_key"),
    ModelNotFoundError: (404, "model_not_found"),
    RequestNotFoundError: (404, "request_not_found"),
    RequestAbortedError: (499, "request_aborted"),
    RequestTimeoutError: (408, "request_timeout"),
    engine_errors.DeadlineError: (408, "request_timeout"),
    BodyTooLargeError: (413, "request_too_large"),
    HeadTooLargeError: (431, "headers_too_large"),
    RequestTooSlowError: (408, "request_timeout"),
    MediaTypeError: (415, "unsupported_media_type"),
    OverloadedError: (429, "slow_down"),
    engine_errors.AdapterError: (400, "invalid_request_error"),
    engine_errors.GrammarError: (400, "invalid_request_error"),
    engine_errors.EngineRestartingError: (503, "server_is_overloaded"),
    EngineUnavailableError: (503, "server_is_overloaded"),
    NotReadyError: (503, "server_is_overloaded"),
    engine_errors.EngineGivenUpError: (503, "engine_given_up"),
    EngineFailedError: (500, "internal_error"),
    # Errors of start-up. In a request they would be a bug of this program.
    ConfigError: (500, "internal_error"),
    ModelError: (500, "internal_error"),
    engine_errors.UnsupportedModelError: (500, "internal_error"),
    engine_errors.ModelMemoryError: (500, "internal_error"),
    engine_errors.DeviceFailedError: (500, "internal_error"),  # it ends the engine process: no request meets it
    engine_errors.RemotePrefillError: (500, "internal_error"),  # the prompt is computed here: no request meets it
    TwostepError: (500, "internal_error"),
    ApiError: (500, "internal_error"),
    ZeroDivisionError: (500, "internal_error"),
}


@pytest.mark.parametrize("error", TABLE, ids=lambda error: error.__name__)
def test_each_class_has_its_status_and_code(error: type[Exception]) -> None:
    assert (kind_of(error).status, kind_of(error).code) == TABLE[error]


@pytest.mark.parametrize("module", [engine_errors, server_errors])
def test_no_class_is_missing_here(module: object) -> None:
    classes = {value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert {each for each in classes if each.__module__ == module.__name__} <= TABLE.keys()  # type: ignore[attr-defined]


REFUSALS: list[tuple[TwostepError, int, str, str | None]] = [
    (OverloadedError("Full.", retry_after_s=2.1), 429, "slow_down", "3"),
    (OverloadedError("Full.", retry_after_s=0.0), 429, "slow_down", "1"),
    (EngineUnavailableError("Dead."), 503, "server_is_overloaded", "2"),
    (engine_errors.EngineGivenUpError("Dead for good."), 503, "engine_given_up", None),
    (RequestTimeoutError("Late."), 408, "request_timeout", None),
    (ContextLengthError("Long."), 400, "context_length_exceeded", None),
    (InvalidParameterError("top_k", "Odd."), 400, "invalid_request_error", None),
    (EngineFailedError("Broken.", "secret"), 500, "internal_error", None),
]


@pytest.mark.parametrize(("refusal", "status", "code", "retry_after"), REFUSALS)
@pytest.mark.parametrize("parameters", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
def test_what_the_engine_refuses_has_a_status(
    server: LiveServer,
    refusal: TwostepError,
    status: int,
    code: str,
    retry_after: str | None,
    parameters: dict[str, Any],
) -> None:
    server.engine.refusal = refusal
    response = server.complete("Hi", **parameters)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert response.headers.get("retry-after") == retry_after
    assert error_of(response)["param"] == getattr(refusal, "param", None)
    assert "secret" not in response.text


def test_a_prompt_that_is_too_long_names_the_limit(server: LiveServer) -> None:
    error = error_of(server.complete("x" * 600))
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 512" in error["message"]


def test_more_sequences_than_fit_the_server_are_refused_for_good(server: LiveServer) -> None:
    response = server.complete(["x"] * 200, n=2)
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")


@pytest.mark.parametrize("parameters", [{"prompt": [[1]] * 9}, {"prompt": "Hi", "n": 9}])
def test_the_failure_of_one_choice_ends_the_others(server: LiveServer, parameters: dict[str, Any]) -> None:
    server.engine.fail_at = 5
    assert server.complete(**parameters).status_code == 500
    server.wait_until_idle()
    assert len(server.engine.finished) == 9


@pytest.mark.parametrize("n", [1, 3])
def test_after_the_first_byte_an_error_is_an_event(
    server: LiveServer, caplog: pytest.LogCaptureFixture, n: int
) -> None:
    server.engine.fail_at = 2
    response = server.complete("Hi", stream=True, n=n, headers={"X-Request-Id": "find-me"})
    *chunks, last = chunks_of(response)
    assert chunks and all("choices" in chunk for chunk in chunks)
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["code"] == "internal_error" and "find-me" in last["error"]["message"]
    assert "secret detail" not in response.text and "secret detail" in caplog.text and "find-me" in caplog.text


def test_our_bug_is_500_and_only_the_log_tells_more(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    server.engine.rule = lambda *_: 1 // 0
    response = server.complete("Hi", headers={"X-Request-Id": "find-me"})
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert response.headers["x-request-id"] == "find-me"
    assert "division" not in response.text and "Traceback" not in response.text
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "find-me" in record.getMessage() and record.exc_info is not None


def test_our_bug_in_a_stream_is_an_event(server: LiveServer) -> None:
    server.engine.rule = lambda _, position: ord("a") + 0 // (position - 2)
    assert chunks_of(server.complete("Hi", stream=True))[-1]["error"]["code"] == "internal_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/completions/x", 404, "not_found"),
        ("GET", "/health/x", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_unknown_routes_and_methods(server: LiveServer, method: str, path: str, status: int, code: str) -> None:
    response = server.client.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert (response.status_code == 405) == ("allow" in response.headers)


@pytest.mark.parametrize(
    ("path", "methods"), [("/v1/requests/x", "DELETE, GET, HEAD"), ("/v1/completions", "POST"), ("/docs", "GET, HEAD")]
)
def test_a_405_names_all_methods_of_its_path(server: LiveServer, path: str, methods: str) -> None:
    response = server.client.put(path)
    assert response.headers["allow"] == methods
    assert error_of(response)["message"] == f"{path} does not answer to PUT: use {methods.replace(', ', ' or ')}."


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_unknown_models(server: LiveServer, path: str) -> None:
    field = b'"tokens": [1]' if path == "/detokenize" else b'"prompt": "Hi"'
    response = server.post(path, b'{"model": "other", ' + field + b"}")
    assert (response.status_code, error_of(response)["param"]) == (404, "model")


def test_what_is_no_text_is_spelled_out_in_messages(server: LiveServer) -> None:
    schema = {"schema": {"properties": {"\ud800": {"not": {}}}}}
    refusals = [
        server.complete("Hi", response_format={"type": "json_schema", "json_schema": {"name": "x", **schema}}),
        server.message(output_config={"format": {"type": "json_schema", **schema}}),
    ]
    for response in refusals:
        assert response.status_code == 400
        assert r"/properties/\ud800/not is not supported" in response.json()["error"]["message"]


MALFORMED = {
    "empty": b"",
    "cut": b'{"prompt": "Hi"',
    "two": b'{"prompt": "Hi"} {}',
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "not UTF-8": b'{"prompt": "\xff"}',
    "huge integer": b'{"max_tokens": ' + b"9" * 5000 + b"}",
    "deep": b"[" * 100_000,
    "deep value": b'{"prompt": "Hi", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_malformed_bodies_are_400(server: LiveServer, body: bytes, path: str) -> None:
    response = server.post(path, body)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_bodies_must_say_that_they_are_json(server: LiveServer, media_type: str) -> None:
    response = server.post("/v1/completions", b'{"prompt": "Hi"}', {"Content-Type": media_type})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_may_be_spelled_in_its_ways(server: LiveServer, media_type: str) -> None:
    assert server.post("/v1/completions", b'{"prompt": "Hi"}', {"Content-Type": media_type}).status_code == 200
