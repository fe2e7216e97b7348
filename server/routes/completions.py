"""POST /v1/completions."""

import logging
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.completions.plan import CompletionPlan, make_plan
from server.completions.stream import CompletionStream
from server.completions.tally import Tally
from server.completions.whole import collect, whole_response
from server.context import AppContext, context_of
from server.disconnect import unless_client_leaves
from server.errors import BadRequestError
from server.fanout import generate_all
from server.middleware.record import is_sane_request_id
from server.protocol.completions import CompletionRequest, CompletionResponse
from server.protocol.refusals import COMPLETION_REFUSALS, find_refused, find_unknown
from server.record import RequestRecord, record_of
from server.routes.documented import error_responses
from server.routes.json_route import JsonRoute
from server.sse import EventStream
from server.timings import first_token_headers

logger = logging.getLogger("twostep.server")
router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "With stream: events of the same shape."},
        **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
    },
)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue each prompt. Streamed responses start with the first token; every response tells its phases."""
    context, record = context_of(request), record_of(request.scope)
    model = context.check_model(body.model)
    _check_extra_fields(body)
    if body.request_id is not None:
        _take_request_id(body.request_id, request, record)
    plan = await make_plan(body, context.backend, model=model, request_id=record.request_id, arrival_s=record.arrival_s)
    if body.stream:
        return await _stream(plan, context, request)
    return await _whole(plan, context, request)


async def _stream(plan: CompletionPlan, context: AppContext, request: Request) -> Response:
    """Waits for the first token: until then errors have a status, and the headers can tell the time it took."""
    backend, record = context.backend, record_of(request.scope)
    stream = CompletionStream(plan, Tally(plan, record), record, backend.tokenizer)
    outputs = generate_all(backend.engine, plan.generations)
    try:
        first = await unless_client_leaves(request.receive, anext(outputs))
        return EventStream(
            stream.events(first, outputs),
            outputs,
            first_token_headers(first[1], plan.num_prompt_tokens),
            context.settings.stall_timeout,
        )
    except BaseException:
        await outputs.aclose()
        raise


async def _whole(plan: CompletionPlan, context: AppContext, request: Request) -> Response:
    backend, record = context.backend, record_of(request.scope)
    tally = Tally(plan, record)
    async with aclosing(generate_all(backend.engine, plan.generations)) as outputs:
        candidates = await unless_client_leaves(request.receive, collect(plan, outputs, tally))
    return whole_response(plan, candidates, tally, backend.tokenizer)


def _check_extra_fields(body: CompletionRequest) -> None:
    extra = body.model_extra or {}
    if refused := find_refused(extra, COMPLETION_REFUSALS):
        param, message = refused
        raise BadRequestError(message, param)
    if unknown := find_unknown(extra, COMPLETION_REFUSALS):
        logger.info("ignored fields that nobody defines: %s", ", ".join(ascii(name)[:40] for name in unknown[:10]))


def _take_request_id(request_id: str, request: Request, record: RequestRecord) -> None:
    """The body may name the request; a header that does has precedence."""
    if not is_sane_request_id(request_id):
        message = "request_id must be printable ASCII without spaces, at most 128 characters."
        raise BadRequestError(message, "request_id")
    if request.headers.get("x-request-id") != record.request_id:
        record.request_id = request_id
