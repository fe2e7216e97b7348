"""Responses fit the types of the vendors' clients, strictly: these are made of the vendors' schemas.

The clients themselves are lenient: they would take a wrong type, and hand it on. What they can ask for is
known by name.
"""

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParamsStreaming
from openai.types.completion_create_params import CompletionCreateParamsStreaming
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.model import Model
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import TypeAdapter, ValidationError

from server.protocol import refusals
from server.protocol.anthropic import MessagesRequest
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.request import RequestFields
from server.protocol.responses import ResponsesRequest
from tests.server.live_server import LiveServer
from tests.server.model_talk import ANTHROPIC_TOOLS, RESPONSES_TOOLS, THOUGHT, saying_tokens

GOLDEN = Path(__file__).parents[1] / "golden"
CHUNKS: dict[str, Any] = {
    "completion": Completion,
    "chat": ChatCompletionChunk,
    "response": ResponseStreamEvent,
    "message": RawMessageStreamEvent,
}
CHAT_TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]

# Parameters of billing, of the user and the region: no effect on the answer.
IGNORED = {
    *("access_programs", "diagnostics"),
    *("user_profile_id", "workspace_id", "betas", "billing_policy", "fallback_credit_token"),
    "image",  # how images are read, and there are none
}

# OpenAI's completions have nulls where its schema has none: in chunks before the last, and for an echoed first token.
NULLS = {"finish_reason", "token_logprobs", "top_logprobs"}


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def misfits(kind: Any, data: bytes | str) -> list[str]:
    try:
        adapter_of(kind).validate_json(data, strict=True)
    except ValidationError as error:
        found = error.errors()
        return [str(each) for each in found if kind is not Completion or each["input"] or NULLS.isdisjoint(each["loc"])]
    return []


def chunks_in(path: Path) -> list[str]:
    """Returns the chunks in a golden file without errors, which clients recognize before they look at types."""
    lines = path.read_text(encoding="ascii").splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return [each for each in data if not each.startswith(('{"error":', '{"type":"error",'))]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sse")), ids=lambda path: path.stem)
def test_chunks_fit(path: Path) -> None:
    """The golden files are what streams are, byte by byte."""
    chunks = chunks_in(path)
    assert (
        chunks and [misfit for chunk in chunks for misfit in misfits(CHUNKS[path.stem.partition("_")[0]], chunk)] == []
    )


@pytest.mark.parametrize(
    ("kind", "ask"),
    [
        (Completion, lambda server: server.complete("Hi", n=2, logprobs=2, echo=True)),
        (ChatCompletion, lambda server: server.chat("Hi", n=2, logprobs=True, top_logprobs=2)),
        (ChatCompletion, lambda server: server.chat("Hi", tools=CHAT_TOOLS)),
        (Response, lambda server: server.respond(tools=RESPONSES_TOOLS, include=["message.output_text.logprobs"])),
        (Response, lambda server: server.respond(tools=RESPONSES_TOOLS, max_output_tokens=9)),
        (Message, lambda server: server.message(tools=ANTHROPIC_TOOLS, max_tokens=200)),
        (CreateEmbeddingResponse, lambda server: server.post("/v1/embeddings", b'{"input": ["a", "b"]}')),
        (Model, lambda server: server.client.get("/v1/models/fake")),
    ],
)
def test_answers_fit(agent: LiveServer, kind: Any, ask: Callable[[LiveServer], Any]) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    response = ask(agent)
    assert response.status_code == 200 and misfits(kind, response.content) == []


@pytest.mark.parametrize(
    ("body", "refused", "theirs"),
    [
        (CompletionRequest, refusals.COMPLETION_REFUSALS, CompletionCreateParamsStreaming),
        (ChatRequest, refusals.CHAT_REFUSALS, ChatParamsStreaming),
        (ResponsesRequest, refusals.RESPONSES_REFUSALS, ResponseCreateParamsStreaming),
        (MessagesRequest, refusals.ANTHROPIC_REFUSALS, MessageCreateParamsStreaming),
        (EmbeddingRequest, refusals.EMBEDDING_REFUSALS, EmbeddingCreateParams),
    ],
)
def test_no_parameter_of_the_vendors_is_ignored_in_silence(
    body: type[RequestFields], refused: Collection[str], theirs: Any
) -> None:
    """A newer client may have more: implement them, refuse them, or list them as without effect on the answer."""
    names = theirs.__required_keys__ | theirs.__optional_keys__
    assert names - body.model_fields.keys() - set(refused) - refusals.WITHOUT_EFFECT - IGNORED == set()
