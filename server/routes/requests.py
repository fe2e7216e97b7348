"""/v1/requests: the requests that are running or waiting. An API key sees and aborts its own only."""

import time

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.core.request_snapshot import RequestSnapshot
from server.core.chunked_json import json_list
from server.core.errors import RequestNotFoundError
from server.protocol.live_requests import LiveRequest, LiveRequestList, RequestDeletion
from server.routes.documented import error_responses
from server.routes.live_requests import live_requests
from server.runtime.context import context_of, tenant_of

MAX_SEQUENCES = 1000
SLICE = 100
"""Requests that are encoded before other tasks have their turn."""

router = APIRouter(tags=["Operations"])


@router.get("/v1/requests", response_model=LiveRequestList, responses=error_responses(401, 503))
async def list_requests(request: Request) -> Response:
    """List the requests that run or wait and were sent with this API key, the oldest first: at most 1000 sequences."""
    snapshots = await _inspect(request, None, MAX_SEQUENCES + 1)
    listed = live_requests(snapshots[:MAX_SEQUENCES], time.monotonic())
    return _json({"object": "list", "data": await json_list(listed, SLICE), "has_more": len(snapshots) > MAX_SEQUENCES})


@router.get("/v1/requests/{id:path}", response_model=LiveRequest, responses=error_responses(401, 404, 503))
async def show_request(id: str, request: Request) -> Response:
    """Show the sequences that run or wait under this `X-Request-Id`."""
    snapshots = await _inspect(request, id, MAX_SEQUENCES)
    if not snapshots:
        raise _not_found(id)
    return _json(next(live_requests(snapshots, time.monotonic())))


@router.delete("/v1/requests/{id:path}", responses=error_responses(401, 404, 503))
async def abort_request(id: str, request: Request) -> RequestDeletion:
    """Abort all that is live under this `X-Request-Id`. A response that has begun ends with the tokens it has:
    `finish_reason` is `length`, `stop_reason` is `abort`. One that has not is a 499."""
    if not context_of(request).backend.engine.abort(tenant_of(request).name, id):
        raise _not_found(id)
    return RequestDeletion(id=id)


async def _inspect(request: Request, id: str | None, limit: int) -> list[RequestSnapshot]:
    return await context_of(request).backend.engine.inspect(tenant_of(request).name, id, limit)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _not_found(id: str) -> RequestNotFoundError:
    return RequestNotFoundError(f"No request {id[:150]!r} is live here.")
