"""POST /reset_prefix_cache, as vLLM has it."""

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from server.core.errors import BadRequestError, NotReadyError
from server.core.request_record import record_of
from server.routes.documented import error_responses
from server.runtime.context import context_of

router = APIRouter(tags=["Operations"])


class Reset(BaseModel):
    success: bool = True


@router.post("/reset_prefix_cache", responses=error_responses(400, 401, 503))
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> Reset:
    """Forget what prompts began with so far, also in the KV store if `reset_external`. Requests that run go on, with
    blocks that no other request finds."""
    context = context_of(request)
    if context.keys.share_of(record_of(request.scope).key) < 1:
        raise BadRequestError("The prefix cache is shared by all API keys, so none of several may reset it.")
    if reset_running_requests:
        raise BadRequestError(
            "Requests that run keep their blocks, which no new request finds: leave reset_running_requests out.",
            "reset_running_requests",
        )
    engine = context.backend.engine
    if not engine.is_ready:
        raise NotReadyError("No engine is up whose prefix cache could be reset.")
    engine.reset_prefix_cache(reset_external)
    return Reset()
