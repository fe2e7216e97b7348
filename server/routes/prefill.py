"""POST /v1/prefill, of servers with `--role prefill`: computes a prompt into the KV store for a decode server.

Whoever has an API key of this server may name any tenant and any cache salt, as decode servers have to.
"""

from contextlib import aclosing

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.core.generation_request import GenerationRequest
from engine.core.outputs import RequestOutput
from engine.core.sampling_params import SamplingParams
from server.core.errors import BadRequestError
from server.core.request_record import RequestRecord, record_of
from server.core.timings import PhaseReport, TokenCounts, complete_headers
from server.generation.fan_out import generate_all
from server.generation.promises import promises_of
from server.protocol.prefill import PrefillRequest, PrefillResponse
from server.routes.documented import error_responses
from server.routes.json_route import JsonRoute
from server.runtime.context import context_of

_PARAMS = SamplingParams(max_tokens=0)

router = APIRouter(route_class=JsonRoute, tags=["Roles"])


@router.post(
    "/v1/prefill",
    response_model=PrefillResponse,
    responses=error_responses(400, 401, 408, 413, 415, 429, 500, 503),
)
async def prefill(body: PrefillRequest, request: Request) -> Response:
    """Compute a prompt, and answer when its full blocks are in the KV store. For servers with `--role decode`."""
    context, record = context_of(request), record_of(request.scope)
    info = context.backend.engine.info
    record.promises = promises_of(request.headers, info, tokens_per_step=1)
    generation = _generation(body, record)
    if body.kv_fingerprint != info.kv_fingerprint:
        message = "its engine and this server's must have the same model, settings, version and kind of CPU"
        raise BadRequestError(f"What the decode server's engine computes differs: {message}.", "kv_fingerprint")
    async with aclosing(generate_all(context.backend.engine, [generation])) as outputs:
        [output] = [output async for _, output in outputs]
    record.note_end(0, output)
    context.metrics.on_handed_over(output.num_stored_tokens)
    record.report = lambda: _report(output)
    timings = _report(output).body()
    answer = {"stored_tokens": output.num_stored_tokens, "timings": timings}
    return Response(msgspec.json.encode(answer), headers=complete_headers(timings), media_type="application/json")


def _generation(body: PrefillRequest, record: RequestRecord) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=body.token_ids,
        params=_PARAMS,
        arrival_s=record.arrival_s,
        client_request_id=record.request_id,
        priority=body.priority,
        tenant=body.tenant,
        weight=body.weight,
        share=body.share,
        cache_salt=body.cache_salt,
        adapter=body.adapter,
        until_stored=True,
        num_announced_tokens=min(body.stored_tokens, len(body.token_ids) - 1),
        max_queue_s=None if body.max_queue_ms is None else body.max_queue_ms / 1e3,
        ttft_limit_s=record.promises.ttft_s,
        deadline_s=None if body.deadline_ms is None else body.deadline_ms / 1e3,
    )


def _report(output: RequestOutput) -> PhaseReport:
    counts = TokenCounts(prompt=output.num_prompt_tokens, cached=output.num_cached_tokens, output=0)
    return PhaseReport.of([output.timings] if output.timings else [], counts)
