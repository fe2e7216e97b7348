"""POST /v1/responses."""

import asyncio
import logging

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat.logprobs import ChatLogprobsFormatter
from server.chat.output_reader import OutputReader
from server.chat.plan import plan_chat
from server.chat.usage import ChatUsageCounter
from server.core.request_record import record_of
from server.generation.entry import validate_request
from server.generation.respond import all_outputs, open_stream
from server.generation.resume_points import resume_points
from server.generation.typed_stream import TypedStream
from server.protocol.refusals import RESPONSES_REFUSALS
from server.protocol.response_answers import ResponseBody
from server.protocol.responses import ResponsesRequest
from server.responses.function_tools import offered_tools
from server.responses.head import response_head
from server.responses.translate import renaming, to_chat
from server.responses.whole import whole_response
from server.responses.writer import ResponseWriter
from server.routes.documented import error_responses
from server.routes.generation_route import GenerationRoute
from server.runtime.context import context_of

logger = logging.getLogger("twostep.server")
router = APIRouter(route_class=GenerationRoute, tags=["OpenAI"])


@router.post(
    "/v1/responses",
    response_model=ResponseBody,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "With stream: OpenAI's events, named by type."},
        **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
    },
)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, in OpenAI's newer form. Nothing is stored: each request brings the whole conversation."""
    arrival = validate_request(body, RESPONSES_REFUSALS, request)
    backend, record = context_of(request).backend, record_of(request.scope)
    offered = offered_tools(body)
    if offered.left_out:
        logger.info("request %s: left out built-in tools: %s", arrival.request_id, ", ".join(offered.left_out))
    with renaming(body, offered)():
        plan, answer = await arrival.within_deadline(plan_chat(to_chat(body, offered), backend, arrival))
        reader = OutputReader(answer, arrival.request_id, 0)
        counter = ChatUsageCounter(plan, [reader], record)
        logprobs = (
            None if body.num_logprobs is None else ChatLogprobsFormatter(backend.tokenizer, body.num_logprobs, False)
        )
        writer = ResponseWriter(response_head(body, plan, arrival), offered, reader, counter, logprobs)
        if body.stream:
            points = resume_points(plan, counter, body.resume_points)
            return await open_stream(plan, TypedStream(writer, counter, record, points), request)
        [outputs] = await all_outputs(plan, counter, request)
    for output in outputs:
        writer.add(output)
        await asyncio.sleep(0)
    writer.end()
    return await whole_response(writer.whole(), context_of(request).settings.stall_timeout)
