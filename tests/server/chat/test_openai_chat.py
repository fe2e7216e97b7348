"""OpenAI's official client in chats: synchronous and not, streamed and not."""

import asyncio
from collections.abc import Generator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]


@pytest.fixture
def client(server: LiveServer) -> Generator[OpenAI, None, None]:
    server.engine.rule = saying("Hello\u2028there")
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_answers(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2)
    message, logprobs = answer.choices[0].message, answer.choices[0].logprobs
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", "Hello\u2028there", "stop")
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 14
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 14
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_its_answer_can_be_sent_back(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES).choices[0].message
    again = client.chat.completions.create(
        model="fake",
        messages=[*MESSAGES, answer.model_dump(), {"role": "user", "content": "And?"}],  # type: ignore[list-item]
    )
    assert again.choices[0].message.content == "Hello\u2028there"


def test_it_streams(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello\u2028there"
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 14


def test_its_stream_helper_builds_the_message(client: OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=MESSAGES, logprobs=True, n=2) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello\u2028there"] * 2
    assert final.choices[0].logprobs is not None and len(final.choices[0].logprobs.content or ()) == 14
    assert kinds.count("content.done") == 2


def test_it_works_without_threads(server: LiveServer) -> None:
    server.engine.rule = saying("yes")

    async def talk() -> tuple[str | None, str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="fake", messages=MESSAGES)
            stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(talk()) == ("yes", "yes")


def test_it_understands_errors(server: LiveServer, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=[{"role": "narrator", "content": "x"}])  # type: ignore[list-item]
    assert bad.value.param == "messages.0.role"
    server.engine.fail_at = 1
    with pytest.raises(openai.APIError) as failure:
        list(client.chat.completions.create(model="fake", messages=MESSAGES, stream=True))
    assert failure.value.code == "internal_error"


def test_it_stops_when_it_has_enough(server: LiveServer, client: OpenAI) -> None:
    server.engine.rule, server.engine.delay_s = (lambda *_: ord("x")), 0.001
    with client.chat.completions.create(model="fake", messages=MESSAGES, stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()
