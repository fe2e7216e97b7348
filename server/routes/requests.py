"""/v1/requests: the requests that are running or waiting. A key sees and ends its own only."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from server.context import context_of
from server.errors import RequestNotFoundError
from server.record import record_of
from server.routes.documented import error_responses

router = APIRouter(tags=["Operations"])


class RequestDeletion(BaseModel):
    id: str
    object: Literal["request"] = "request"
    deleted: Literal[True] = True


@router.delete("/v1/requests/{id:path}", responses=error_responses(401, 404, 503))
async def abort_request(id: str, request: Request) -> RequestDeletion:
    """End all that is live under this `X-Request-Id`. A response that has begun ends with the tokens it has:
    `finish_reason` is `length`, `stop_reason` is `abort`. One that has not is a 499."""
    if not context_of(request).backend.engine.abort(record_of(request.scope).key.name, id):
        raise _not_found(id)
    return RequestDeletion(id=id)


def _not_found(request_id: str) -> RequestNotFoundError:
    return RequestNotFoundError(f"No request {request_id[:150]!r} is live here.")
