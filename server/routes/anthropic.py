"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

import logging

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.core.errors import ContextLengthError
from server.anthropic.tools import label_of, left_out
from server.anthropic.translate import renaming_for, to_chat
from server.anthropic.writer import PING, MessageForm, MessageWriter
from server.chat.answer import thinking_marks
from server.chat.output_reader import OutputReader
from server.chat.plan import ChatPlan, chat_prompt, plan_chat
from server.chat.usage import ChatUsageCounter
from server.core.request_record import record_of
from server.core.timings import complete_headers
from server.generation.entry import Arrival, validate_request
from server.generation.respond import all_outputs, open_stream
from server.generation.resume_points import resume_points
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

logger = logging.getLogger("twostep.server")

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
    _log_left_out(body, arrival.request_id)
    with renaming_for(body)():
        chat, shortens = _chat_of(body, backend), body.truncate_prompt_tokens != -1  # then the prompt makes room
        plan, answer = await arrival.within_deadline(plan_chat(chat, backend, arrival, shortens))
        _check_fits(plan, backend.engine.info.max_model_len - 1)
        reader = OutputReader(answer, arrival.request_id, 0)
        counter = ChatUsageCounter(plan, [reader], record)
        writer = MessageWriter(_form(body, plan, arrival), reader, counter, arrival.request_id)
        if body.stream:
            points = resume_points(plan, counter, body.resume_points)
            return await open_stream(plan, TypedStream(writer, counter, record, points), request, PING)
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
    with renaming_for(body)():
        prompt = await chat_prompt(_chat_of(body, backend), backend)
    return TokenCount(input_tokens=len(prompt.token_ids))


def _form(body: MessagesRequest, plan: ChatPlan, arrival: Arrival) -> MessageForm:
    head = {"id": f"msg_{arrival.request_id}", "type": "message", "role": "assistant", "model": arrival.model}
    return MessageForm(
        head={**head, "seed": plan.head["seed"]},
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        marks_cache=bool(body.cache_controls),
        ends_with_context=plan.generations[0].params.max_tokens < body.max_tokens,
    )


def _check_fits(plan: ChatPlan, limit: int) -> None:
    """Raises ContextLengthError for a prompt without room for an answer, in words by which agents know that they must
    shorten the conversation."""
    if plan.num_prompt_tokens > limit:
        raise ContextLengthError(f"prompt is too long: {plan.num_prompt_tokens} tokens > {limit} maximum")


def _chat_of(body: AnthropicConversation, backend: Backend) -> ChatRequest:
    """Returns the chat request. Where thinking is disabled, a model that thinks all the same must end it at once, if it
    has tokens for that. A model that does not think keeps within any budget."""
    chat = to_chat(body)
    marks = backend.chat.dialect_for(chat).thinking
    if marks is None:
        return chat.model_copy(update={"thinking_token_budget": None})
    if body.thinking is not None and body.thinking.type == "disabled" and thinking_marks(backend.tokenizer, marks):
        return chat.model_copy(update={"thinking_token_budget": 0})
    return chat


def _log_left_out(body: MessagesRequest, request_id: str) -> None:
    if absent := left_out(body):
        names = ", ".join(label_of(tool) for tool in absent[:10])
        logger.info("request %s: left out tools that cannot be run here: %s", request_id, names)


router.include_router(counting)
