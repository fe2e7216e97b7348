"""Runs the app in uvicorn: opens the port, prints the banners, drains on the first signal, stops at once on the
second."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn
from fastapi import FastAPI

from engine.core.errors import TwostepError
from server.app import create_app, generation_routes
from server.banner import UDS_URL, loading_banner, ready_banner, say, url_of
from server.http.connection import BoundedProtocol, ConnectionLimits
from server.http.early_refusal import EarlyRefusals
from server.limits.request_turns import RequestTurns
from server.limits.retry_throttle import RetryThrottle
from server.listener import check_certificate, listen, listen_on_file, raise_file_limit
from server.runtime.backend import OpenBackend
from server.runtime.context import AppContext
from server.runtime.lifecycle import State
from server.service_manager import READY, STOPPING, keep_alive, notify
from server.settings.settings import Settings

logger = logging.getLogger("twostep.server")

KEEP_ALIVE_S = 75
"""Seconds that a connection may be idle between two requests."""
CLOSE_TIMEOUT_S = 3
"""Seconds that connections get at shutdown to read the rest of their responses, after --shutdown-timeout."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(settings: Settings, open_backend: OpenBackend, runner: asyncio.Runner) -> int:
    """Serves on the loop of `runner` until a signal or a failure ends it, and returns the exit code. Raises ConfigError
    if it cannot listen, and the TwostepError by which loading failed."""
    app = create_app(settings, open_backend)
    context: AppContext = app.state.context
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    listener = _listener(settings)
    url = _url_of(settings, listener)
    say(loading_banner(settings, url, None if settings.uds else listener.getsockname()[0]))
    # Cached here, since making it for the first client would block all streams. Not a daemon thread: one that still
    # runs when the process exits would abort it.
    threading.Thread(target=app.openapi).start()
    try:
        runner.run(DrainingServer(server_config(app, context), context, url).serve(sockets=[listener]))
    finally:
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)
    logger.info("stopped")
    return _exit_code(context)


def _listener(settings: Settings) -> socket.socket:
    if settings.uds is not None:
        return listen_on_file(settings.uds)
    return listen(settings.host, settings.port, settings.stall_timeout)


def _url_of(settings: Settings, listener: socket.socket) -> str:
    if settings.uds is not None:
        return UDS_URL
    url = url_of(settings.host, listener.getsockname()[1])
    return url if settings.ssl_certfile is None else url.replace("http:", "https:", 1)


def server_config(app: FastAPI, context: AppContext) -> uvicorn.Config:
    """Returns uvicorn's configuration, with this program's HTTP protocol."""
    settings = context.settings
    limits = ConnectionLimits(
        max_connections=raise_file_limit(settings.max_connections),
        max_head_bytes=int(settings.max_header_bytes),
        header_timeout_s=settings.header_timeout,
        on_refusal=context.metrics.on_rejection,
        error_rate_limit=context.error_rate_limit,
    )
    early = EarlyRefusals(context, generation_routes())
    protocol = partial(
        BoundedProtocol,
        limits=limits,
        early=early,
        retry_throttle=RetryThrottle(),
        request_turns=RequestTurns(),
        url_prefix=settings.root_path or "",  # uvicorn's root_path would be written before each path
    )
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], protocol),
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        proxy_headers=False,  # any client can write them, and so get around limits per address
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )


def _exit_code(context: AppContext) -> int:
    failure, state = context.lifecycle.failure, context.lifecycle.state
    if isinstance(failure, TwostepError) and state is State.FAILED:
        raise failure
    return 0 if failure is None else 1


class DrainingServer(uvicorn.Server):
    """uvicorn's server with this program's banners, signal handlers and drain."""

    def __init__(self, config: uvicorn.Config, context: AppContext, url: str) -> None:
        super().__init__(config)
        self._context = context
        self._url = url
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = [asyncio.create_task(self._announce()), asyncio.create_task(keep_alive(self._is_well))]
        try:
            await super().serve(sockets)
        finally:
            for task in tasks:
                task.cancel()
            await self._context.lifecycle.stop()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handles signals while the server runs. uvicorn's own method raises the signal again at the end, and the exit
        code would not be 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        if self._context.settings.api_keys_file is not None:
            loop.add_signal_handler(signal.SIGHUP, self._context.keys.reload)
        try:
            yield
        finally:
            for number in (*SIGNALS, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_exit())
        else:
            self._context.lifecycle.end_drain()

    async def _drain_and_exit(self) -> None:
        """Drains, stops the engine, then ends the server. The port stays open meanwhile, so that new requests get a 503
        and not a refused connection."""
        lifecycle, timeout_s = self._context.lifecycle, self._context.settings.shutdown_timeout
        notify(STOPPING)
        if num_left := lifecycle.num_under_way:
            requests = "request" if num_left == 1 else "requests"
            logger.info("ending: %d %s may go on for %g s; a second signal ends at once", num_left, requests, timeout_s)
        await lifecycle.drain(timeout_s)
        await lifecycle.stop()
        self.should_exit = True

    def _is_well(self) -> bool:
        """Whether a service manager may leave the process alone: an engine that hangs or was given up is not well."""
        lifecycle = self._context.lifecycle
        if lifecycle.state is not State.READY:
            return True
        try:
            lifecycle.backend.engine.check_health()
        except TwostepError:
            return False
        return True

    async def _announce(self) -> None:
        context = self._context
        state = await context.lifecycle.settled()
        if state is State.READY:
            say(ready_banner(context.settings, context.backend.engine.info, self._url))
            notify(READY)
        elif state is State.FAILED:
            self.should_exit = True
