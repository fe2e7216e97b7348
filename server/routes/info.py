"""What is running: version, settings, what the engine measured, statistics and metrics."""

from contextlib import suppress
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from server.core.errors import NotReadyError
from server.core.version import VERSION
from server.metrics.metrics import CONTENT_TYPE
from server.protocol.stats import Stats
from server.routes.documented import error_responses
from server.runtime.context import context_of

SETTLE_S = 1.0
"""Longest wait of a scrape for the engine's numbers to be those after the requests that have ended."""

router = APIRouter(tags=["Operations"])


class Version(BaseModel):
    version: str


class ServerInfo(BaseModel):
    version: str
    system_fingerprint: str
    settings: dict[str, Any]
    """The settings in force, without the API keys."""
    engine: dict[str, Any]


@router.get("/version")
async def version() -> Version:
    """The server's version. Answers also while the model loads."""
    return Version(version=VERSION)


@router.get("/server_info", responses=error_responses(401, 503))
async def server_info(request: Request) -> ServerInfo:
    """The settings in force, and what the engine measured while loading."""
    context = context_of(request)
    backend, settings = context.backend, context.settings
    limits = settings.engine_config().limits_on(backend.engine.info.device)
    given = settings.model_dump(mode="json", exclude={"api_key", "api_keys_file"})
    return ServerInfo(
        version=VERSION,
        system_fingerprint=backend.fingerprint(),
        settings=given | msgspec.to_builtins(limits),
        engine=msgspec.to_builtins(backend.engine.info),
    )


@router.get("/stats", responses=error_responses(401, 503))
async def stats(request: Request) -> Stats:
    """Latencies of recent requests and durations of recent steps, of all API keys together."""
    return context_of(request).metrics.recent()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus text format. Answers also while the model loads."""
    with suppress(NotReadyError):
        await context_of(request).backend.engine.settle(SETTLE_S)
    return Response(context_of(request).metrics.render(), media_type=CONTENT_TYPE)
