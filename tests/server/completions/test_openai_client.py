"""OpenAI's official client as a consumer of completions, models and errors."""

from collections.abc import Generator

import openai
import pytest
from openai import OpenAI

from engine.core.errors import RequestTimeoutError
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer, live_server


@pytest.fixture
def client(server: LiveServer) -> Generator[OpenAI, None, None]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_completes(server: LiveServer, client: OpenAI) -> None:
    server.engine.rule = saying("Hello\u2028there")
    answer = client.completions.create(model="fake", prompt="Hi", logprobs=2, extra_body={"top_k": 3})
    assert answer.choices[0].text == "Hello\u2028there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 14
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.text_offset is not None


def test_it_streams(server: LiveServer, client: OpenAI) -> None:
    server.engine.rule = saying("Hello\u2028there\x85")
    options = {"include_usage": True}
    chunks = list(client.completions.create(model="fake", prompt="Hi", stream=True, stream_options=options))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello\u2028there\x85"
    assert chunks[-1].usage.completion_tokens == 16


def test_it_stops_when_it_has_enough(server: LiveServer, client: OpenAI) -> None:
    server.engine.delay_s = 0.001
    with client.completions.create(model="fake", prompt="Hi", max_tokens=400, stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()


def test_it_understands_errors(server: LiveServer, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="Hi", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="Hi")
    assert unknown.value.code == "model_not_found"


def test_it_does_not_repeat_what_its_own_deadline_ended(server: LiveServer, client: OpenAI) -> None:
    server.engine.refusal = RequestTimeoutError("Late.", is_own_limit=True)
    with pytest.raises(openai.APIStatusError) as late:
        client.with_options(max_retries=2).completions.create(
            model="fake", prompt="Hi", extra_body={"deadline_ms": 1000}
        )
    assert late.value.status_code == 408 and late.value.request.headers["x-stainless-retry-count"] == "0"


def test_it_understands_errors_in_streams(server: LiveServer, client: OpenAI) -> None:
    server.engine.fail_at = 1
    with pytest.raises(openai.APIError) as failure:
        list(client.completions.create(model="fake", prompt="Hi", stream=True))
    assert failure.value.code == "internal_error"


def test_it_lists_models(server: LiveServer, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "twostep"


def test_it_sends_its_key() -> None:
    with live_server(api_key=["right"]) as server, OpenAI(base_url=f"{server.url}/v1", api_key="right") as client:
        assert client.models.list().data
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
