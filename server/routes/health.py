"""Liveness, readiness and load of the server, for probes and load balancers."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from server.core.errors import NotReadyError
from server.routes.documented import error_responses
from server.runtime.context import context_of
from server.runtime.lifecycle import State

router = APIRouter(tags=["Operations"])


class Status(BaseModel):
    status: Literal["ok", "restarting"] = "ok"
    """restarting: the engine process died and another one loads the model; streams and new requests wait for it."""


class Load(BaseModel):
    server_load: int
    """Sequences that have arrived and not ended."""
    requests_running: int
    requests_waiting: int
    waiting_tokens: int
    """Prompt tokens of requests without a first token."""
    predicted_wait_ms: float
    """Predicted time until one more request would be scheduled."""
    kv_cache_usage_ratio: float
    kv_cache_tokens: int
    """Tokens that the KV cache has room for: about as much of prompts can be cached."""


@router.get("/health", responses=error_responses(503))
async def health(request: Request) -> Status:
    """Liveness: 503 when the engine is given up, or silent although it has work. Stays 200 while it is restarted and
    while the server drains."""
    engine = context_of(request).backend.engine
    engine.check_health()
    return Status(status="ok" if engine.is_ready else "restarting")


@router.get("/ready", responses=error_responses(503))
async def ready(request: Request) -> Status:
    """Readiness: 503 while no engine is up to do new work, and when the server stops. For its load see `/load`."""
    context = context_of(request)
    if context.lifecycle.state is not State.READY:
        raise NotReadyError("The server is shutting down.")
    context.backend.engine.check_health()
    if not context.backend.engine.is_ready:
        raise NotReadyError("The engine is being restarted.")
    return Status()


@router.get("/load", responses=error_responses(503))
async def load(request: Request) -> Load:
    """Load of the server and its engine, for load balancers."""
    engine = context_of(request).backend.engine
    stats, queue = engine.last_stats, engine.queue_stats
    return Load(
        server_load=engine.num_live,
        requests_running=stats.num_running if stats else 0,
        requests_waiting=stats.num_waiting if stats else 0,
        waiting_tokens=queue.num_waiting_tokens,
        predicted_wait_ms=round(queue.predicted_wait_s * 1e3, 3),
        kv_cache_usage_ratio=stats.pool.held / engine.info.num_blocks if stats else 0.0,
        kv_cache_tokens=engine.info.kv_capacity_tokens,
    )
