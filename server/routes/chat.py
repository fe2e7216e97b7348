"""POST /v1/chat/completions, and /v1/chat/completions/render for its prompt alone."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat.choice import ChatChoice
from server.chat.output_reader import OutputReader
from server.chat.plan import plan_chat
from server.chat.usage import ChatUsageCounter
from server.chat.whole import prompt_fields, whole_response
from server.core.request_record import record_of
from server.generation.entry import validate_request
from server.generation.respond import all_outputs, stream_response
from server.protocol.chat import ChatChunk, ChatRequest, ChatResponse, RenderResponse
from server.protocol.refusals import CHAT_REFUSALS
from server.routes.documented import error_responses
from server.routes.generation_route import GenerationRoute
from server.routes.json_route import JsonRoute
from server.runtime.context import context_of

router = APIRouter(route_class=GenerationRoute, tags=["OpenAI"])
rendering = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse | ChatChunk,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "With stream: events, each a chunk."},
        **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
    },
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation. Streamed responses start with the first token; every response reports its phases."""
    arrival = validate_request(body, CHAT_REFUSALS, request)
    backend = context_of(request).backend
    plan, answer = await arrival.within_deadline(plan_chat(body, backend, arrival))
    readers = [OutputReader(answer, str(plan.head["id"]), index) for index in range(len(plan.generations))]
    choices = [ChatChoice(index, body, reader, backend.tokenizer) for index, reader in enumerate(readers)]
    counter = ChatUsageCounter(plan, readers, record_of(request.scope))
    if body.stream:
        first_event_fields = partial(prompt_fields, plan, tokenizer=backend.tokenizer)
        return await stream_response(plan, choices, counter, request, first_event_fields)
    outputs = await all_outputs(plan, counter, request)
    stall_timeout_s = context_of(request).settings.stall_timeout
    return await whole_response(plan, choices, outputs, counter, backend.tokenizer, stall_timeout_s)


@rendering.post("/v1/chat/completions/render", responses=error_responses(400, 401, 404, 413, 415, 429, 503))
async def render_chat_completion(body: ChatRequest, request: Request) -> RenderResponse:
    """Render the prompt that this request makes, as text and token ids. Nothing is generated."""
    arrival = validate_request(body, CHAT_REFUSALS, request)
    backend = context_of(request).backend
    plan, _ = await arrival.within_deadline(plan_chat(body, backend, arrival))
    prompt = plan.prompts[0]
    return RenderResponse(
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        count=len(prompt.token_ids),
        max_tokens=plan.generations[0].params.max_tokens,
        max_model_len=backend.engine.info.max_model_len,
    )


router.include_router(rendering)
