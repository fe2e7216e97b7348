"""What is running: version, settings, what the engine measured, statistics and metrics, and a live page of them."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from server.core.errors import NotReadyError
from server.core.version import VERSION
from server.metrics.metrics import CONTENT_TYPE
from server.protocol.stats import Stats
from server.routes.documented import error_responses
from server.runtime.context import context_of

SETTLE_S = 1.0
"""Longest wait of a scrape for the engine's numbers to be those after the requests that have ended."""

router = APIRouter(tags=["Operations"])

_LIVE_PAGE = (Path(__file__).parents[1] / "live_page.html").read_bytes()
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


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


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def live_page() -> HTMLResponse:
    """A page that shows, second by second, what `/load`, `/stats` and `/v1/requests` report. It needs no API key, and
    asks for the one that these need."""
    return HTMLResponse(_LIVE_PAGE, headers={"Content-Security-Policy": _POLICY})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus text format. Answers also while the model loads."""
    with suppress(NotReadyError):
        await context_of(request).backend.engine.settle(SETTLE_S)
    return Response(context_of(request).metrics.render(), media_type=CONTENT_TYPE)
