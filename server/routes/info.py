"""What is running: version, settings, what the engine measured; and the metrics."""

from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from server.context import context_of
from server.metrics import CONTENT_TYPE
from server.routes.documented import error_responses
from server.version import VERSION

router = APIRouter(tags=["Operations"])


class Version(BaseModel):
    version: str


class ServerInfo(BaseModel):
    version: str
    system_fingerprint: str
    settings: dict[str, Any]
    """Without the API keys."""
    engine: dict[str, Any]


@router.get("/version")
async def version() -> Version:
    """Answers also while the model loads."""
    return Version(version=VERSION)


@router.get("/server_info", responses=error_responses(401, 503))
async def server_info(request: Request) -> ServerInfo:
    """The settings in force, and what the engine found out while loading."""
    context = context_of(request)
    backend = context.backend
    return ServerInfo(
        version=VERSION,
        system_fingerprint=backend.fingerprint,
        settings=context.settings.model_dump(mode="json", exclude={"api_key", "api_keys_file"}),
        engine=msgspec.to_builtins(backend.engine.info),
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus text format. Answers also while the model loads."""
    return Response(context_of(request).metrics.render(), media_type=CONTENT_TYPE)
