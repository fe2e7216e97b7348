"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.anthropic.translate import RENAMING, to_chat
from server.anthropic.writer import PING, MessageWriter
from server.chat.answer import thinking_marks
from server.chat.output_reader import OutputReader
from server.chat.plan import chat_prompt, plan_chat
from server.chat.usage import ChatUsageCounter
from server.core.request_record import record_of
from server.core.timings import complete_headers
from server.generation.entry import validate_request
from server.generation.respond import all_outputs, open_stream
from server.generation.typed_stream import TypedStream
from server.protocol.anthropic import (
    AnthropicConversation,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    TokenCount,
)
from server.protocol.chat import ChatRequest
from server.protocol.refusals import ANTHROPIC_REFUSALS
from server.routes.documented import anthropic_error_responses
from server.routes.generation_route import GenerationRoute
from server.routes.json_route import JsonRoute
from server.runtime.backend import Backend
from server.runtime.context import context_of

router = APIRouter(route_class=GenerationRoute, tags=["Anthropic"])
counting = APIRouter(route_class=JsonRoute, tags=["Anthropic"])


@router.post(
    "/v1/messages",
    response_model=MessageAnswer,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "With stream: Anthropic's events, named by type."},
        **anthropic_error_responses(400, 401, 404, 413, 429, 500, 504, 529),
    },
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation. One that ends with the assistant's text is continued there."""
    arrival = validate_request(body, ANTHROPIC_REFUSALS, request)
    backend, record = context_of(request).backend, record_of(request.scope)
    with RENAMING():
        plan, answer = await arrival.within_deadline(plan_chat(_chat_of(body, backend), backend, arrival))
        reader = OutputReader(answer, arrival.request_id, 0)
        counter = ChatUsageCounter(plan, [reader], record)
        head = {"id": f"msg_{arrival.request_id}", "type": "message", "role": "assistant", "model": arrival.model}
        writer = MessageWriter({**head, "seed": plan.head["seed"]}, reader, counter, arrival.request_id)
        if body.stream:
            return await open_stream(plan, TypedStream(writer, counter, record), request, PING)
        [outputs] = await all_outputs(plan, counter, request)
    for output in outputs:
        writer.add(output)
    message = writer.whole()
    return JSONResponse(message, headers=complete_headers(message["timings"]))


@counting.post("/v1/messages/count_tokens", responses=anthropic_error_responses(400, 401, 404, 413, 429, 500, 529))
async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
    """Count the tokens of the prompt that the same fields would make for a message."""
    validate_request(body, ANTHROPIC_REFUSALS, request)
    backend = context_of(request).backend
    with RENAMING():
        prompt = await chat_prompt(_chat_of(body, backend), backend)
    return TokenCount(input_tokens=len(prompt.token_ids))


def _chat_of(body: AnthropicConversation, backend: Backend) -> ChatRequest:
    """Returns the chat request. Where thinking is disabled, a model that thinks all the same must end it at once, if it
    has tokens for that."""
    chat = to_chat(body)
    is_disabled = body.thinking is not None and body.thinking.type == "disabled"
    if is_disabled and backend.chat.dialect_for(chat).thinks and thinking_marks(backend.tokenizer):
        return chat.model_copy(update={"thinking_token_budget": 0})
    return chat


router.include_router(counting)
