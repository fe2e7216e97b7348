"""What is running: version, settings, what the engine measured, statistics and metrics."""

from contextlib import suppress
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from server.core.errors import NotReadyError
from server.core.request_record import record_of
from server.core.version import VERSION
from server.metrics.diagnosis import Load, diagnose
from server.metrics.metrics import CONTENT_TYPE
from server.protocol.stats import Diagnosis, Stats
from server.protocol.timeline import TimelineBody
from server.routes.documented import error_responses
from server.runtime.context import context_of, tenant_of

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
    given = settings.model_dump(mode="json", exclude={"api_key", "api_keys_file", "prefill_api_key"})
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


@router.get("/stats/diagnosis", responses=error_responses(401, 503))
async def diagnosis(request: Request) -> Diagnosis:
    """Whether the newest answers were slow to start or slow to stream, why, and what would help."""
    context = context_of(request)
    engine, settings = context.backend.engine, context.settings
    limits, stats = settings.engine_config().limits_on(engine.info.device), engine.last_stats
    load = Load(
        running=stats.num_running if stats else 0,
        waiting=stats.num_waiting if stats else 0,
        kv_held_ratio=stats.pool.held / engine.info.num_blocks if stats else 0.0,
        max_num_seqs=limits.max_num_seqs,
        target_itl_ms=limits.target_itl_ms,
        is_quantized=settings.quantization != "none",
    )
    return diagnose(context.metrics.recent(), load)


@router.get("/stats/timeline", response_model=TimelineBody, responses=error_responses(400, 401, 503))
async def timeline(request: Request, after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> Response:
    """What happened lately: seconds and steps of all API keys together, and the requests of this one that ended.
    `after` is the `cursor` of an earlier answer, whose entries are left out."""
    key, tenant = record_of(request.scope).key.name, tenant_of(request).name
    body = context_of(request).metrics.timeline(after, key, tenant)
    return Response(msgspec.json.encode(body), media_type="application/json")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus text format. Answers also while the model loads. Metrics by API key are those of the request's key;
    with `--key-metrics` those of all."""
    context = context_of(request)
    with suppress(NotReadyError):
        await context.backend.engine.settle(SETTLE_S)
    key = None if context.settings.key_metrics else record_of(request.scope).key.name
    return Response(context.metrics.render(key), media_type=CONTENT_TYPE)
