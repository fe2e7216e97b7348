"""The app factory: all state hangs on the app, none on modules, so that several apps can run in one process."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from sse_starlette.sse import AppStatus
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from engine.core.errors import ConfigError
from server.auth.key_ring import KeyRing
from server.core.timings import EXPOSED_HEADERS
from server.core.version import VERSION
from server.exception_handlers import add_exception_handlers
from server.limits.answer_memory import AnswerMemory
from server.limits.error_rate_limit import ErrorRateLimit
from server.limits.large_bodies import LargeBodies
from server.metrics.metrics import Metrics
from server.middleware.access import AccessMiddleware
from server.middleware.auth import AuthMiddleware
from server.middleware.body_limit import BodyLimitMiddleware
from server.middleware.failures import FailureMiddleware
from server.middleware.gate import GateMiddleware
from server.middleware.record import RecordMiddleware
from server.routes import (
    adapters,
    anthropic,
    cache,
    chat,
    completions,
    embeddings,
    health,
    info,
    models,
    ollama,
    ollama_embeddings,
    pages,
    prefill,
    prefix_cache,
    requests,
    responses,
    tokenization,
)
from server.routes.generation_route import GenerationRoute
from server.runtime.backend import OpenBackend
from server.runtime.context import AppContext
from server.runtime.lifecycle import Lifecycle
from server.settings.settings import Settings
from server.telemetry.opening import open_telemetry

_MODULES = (
    completions,
    chat,
    responses,
    anthropic,
    ollama,
    ollama_embeddings,
    embeddings,
    models,
    adapters,
    requests,
    cache,
    prefix_cache,
    tokenization,
    health,
    info,
    pages,
)
_ROUTERS = tuple(module.router for module in _MODULES)


def create_app(settings: Settings, open_backend: OpenBackend) -> FastAPI:
    """Returns the app that serves one model. The model is loaded in a task, which the app's lifespan starts. Raises
    ConfigError."""
    # Importing sse-starlette makes uvicorn cut every open stream at SIGTERM; `lifecycle` drains instead.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    _check_root_path(settings.root_path)
    _check_fair_by(settings)
    metrics = Metrics(settings.model_names[0], with_vllm_names=settings.metrics_alias == "vllm")
    keys = KeyRing(settings.api_key, settings.api_keys_file)
    error_rate_limit = ErrorRateLimit(metrics.on_refusal_answer)
    answer_memory = AnswerMemory(int(settings.answer_memory_bytes))
    metrics.watch_answers(lambda: answer_memory.num_bytes)
    telemetry, lifecycle = open_telemetry(settings.otel), Lifecycle(open_backend, metrics)
    limits = (LargeBodies(), error_rate_limit, answer_memory)
    context = AppContext(settings, metrics, telemetry, lifecycle, keys, *limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        context.lifecycle.start()
        yield
        await context.lifecycle.stop()
        context.telemetry.close()  # no request is left

    app = FastAPI(
        title="twostep",
        version=VERSION,
        summary="OpenAI-compatible inference, with prefill and decode apart",
        lifespan=lifespan,
        middleware=_middlewares(context),
        docs_url=None,  # `server.routes.pages` has one that loads nothing
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # FastAPI's own, which tells texts of errors
    )
    app.state.context = context
    add_exception_handlers(app)
    if settings.role == "prefill":
        app.include_router(prefill.router)
    for router in _ROUTERS:
        app.include_router(router)
    _answer_head(app)
    return app


def _check_root_path(root_path: str | None) -> None:
    """Raises ConfigError for a prefix that cannot be told from the beginning of a route's path."""
    if root_path is not None and any(f"{route.path}/".startswith(f"{root_path}/") for route in _routes()):
        raise ConfigError(f"--root-path: paths of this server begin with {root_path}, too; choose another prefix.")


def _check_fair_by(settings: Settings) -> None:
    """Raises ConfigError where both API keys and addresses would be told apart."""
    if settings.fair_by == "address" and (settings.api_key or settings.api_keys_file is not None):
        raise ConfigError("--fair-by address is for servers without API keys: keys share the engine already.")


def _answer_head(app: FastAPI) -> None:
    """Adds HEAD to every route that has GET: health probes use it. uvicorn leaves the bodies out."""
    for route in _routes():
        if "GET" in (route.methods or ()):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def generation_routes() -> dict[str, GenerationRoute]:
    """Returns the generation routes by their paths."""
    return {route.path: route for route in _routes() if isinstance(route, GenerationRoute)}


def _routes() -> list[APIRoute]:
    return [route for router in (*_ROUTERS, prefill.router) for route in router.routes if isinstance(route, APIRoute)]


def _middlewares(context: AppContext) -> list[Middleware]:
    """Returns the middlewares of the app, outermost first."""
    settings, lifecycle = context.settings, context.lifecycle
    stack = [
        Middleware(RecordMiddleware),
        Middleware(AccessMiddleware, _routes(), context.metrics, context.telemetry, lifecycle),
        Middleware(FailureMiddleware),
    ]
    if settings.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=EXPOSED_HEADERS,
            )
        )
    if not context.keys.is_open:
        stack.append(Middleware(AuthMiddleware, context.keys))
    stack.append(Middleware(GateMiddleware, lifecycle))
    stack.append(Middleware(BodyLimitMiddleware, int(settings.max_body_bytes), settings.body_timeout))
    return stack
