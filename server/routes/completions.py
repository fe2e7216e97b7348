"""POST /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.completions.choice import ChoiceFormatter
from server.completions.plan import plan_completion
from server.completions.whole import whole_response
from server.core.request_record import record_of
from server.generation.entry import validate_request
from server.generation.outputs import in_turns, join_outputs
from server.generation.respond import all_outputs, stream_response
from server.generation.usage import UsageCounter
from server.protocol.completions import CompletionRequest, CompletionResponse
from server.protocol.refusals import COMPLETION_REFUSALS
from server.routes.documented import error_responses
from server.routes.generation_route import GenerationRoute
from server.runtime.context import context_of

router = APIRouter(route_class=GenerationRoute, tags=["OpenAI"])


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "With stream: events of the same shape."},
        **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
    },
)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue each prompt. Streamed responses start with the first token; every response reports its phases."""
    arrival = validate_request(body, COMPLETION_REFUSALS, request)
    backend = context_of(request).backend
    plan = await arrival.within_deadline(plan_completion(body, backend, arrival))
    counter = UsageCounter(plan, record_of(request.scope))
    if body.stream:
        choices = [
            ChoiceFormatter(index, body, plan.prompt_of(index), backend.tokenizer)
            for index in range(len(plan.generations))
        ]
        return await stream_response(plan, choices, counter, request)
    candidates = await in_turns(map(join_outputs, await all_outputs(plan, counter, request)))
    return await whole_response(
        plan, candidates, counter, backend.tokenizer, context_of(request).settings.stall_timeout
    )
