"""Runs the app in uvicorn: opens the port, announces, drains on the first signal, ends what is left on the second."""

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
from server.banner import loading_banner, ready_banner, say, url_of
from server.http.connection import BoundedProtocol, ConnectionLimits
from server.http.early_refusal import EarlyRefusals
from server.limits.retry_throttle import RetryThrottle
from server.listener import listen, raise_file_limit
from server.runtime.backend import OpenBackend
from server.runtime.context import AppContext
from server.runtime.lifecycle import State
from server.settings.settings import Settings

logger = logging.getLogger("twostep.server")

KEEP_ALIVE_S = 75
# For connections whose client does not read what is left for it; running streams have --shutdown-timeout.
CLOSE_TIMEOUT_S = 3
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(settings: Settings, open_backend: OpenBackend) -> int:
    """Serve until told to stop; the process's exit code. Raises ConfigError when it cannot listen, and whatever
    `open_backend` raised of the errors that users can mend."""
    app = create_app(settings, open_backend)
    context: AppContext = app.state.context
    listener = listen(settings.host, settings.port, settings.stall_timeout)
    address, port = listener.getsockname()[:2]
    url = url_of(settings.host, port)
    say(loading_banner(settings, url, address))
    # Else who asks for it first holds up all streams. No daemon: one that still runs at the process's end aborts it.
    threading.Thread(target=app.openapi).start()
    DrainingServer(server_config(app, context), context, url).run(sockets=[listener])
    logger.info("stopped")
    return _exit_code(context)


def server_config(app: FastAPI, context: AppContext) -> uvicorn.Config:
    settings = context.settings
    limits = ConnectionLimits(
        max_connections=raise_file_limit(settings.max_connections),
        max_head_bytes=int(settings.max_header_bytes),
        header_timeout_s=settings.header_timeout,
        on_refusal=context.metrics.on_rejection,
        error_rate_limit=context.error_rate_limit,
    )
    early = EarlyRefusals(context, generation_routes())
    return uvicorn.Config(
        app,
        http=cast(
            type[asyncio.Protocol], partial(BoundedProtocol, limits=limits, early=early, retry_throttle=RetryThrottle())
        ),
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # anybody can write them, and what is bounded by address would not be
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )


def _exit_code(context: AppContext) -> int:
    failure, state = context.lifecycle.failure, context.lifecycle.state
    if isinstance(failure, TwostepError) and state is State.FAILED:
        raise failure
    return 0 if failure is None else 1


class DrainingServer(uvicorn.Server):
    """uvicorn with this program's way to announce itself and to end."""

    def __init__(self, config: uvicorn.Config, context: AppContext, url: str) -> None:
        super().__init__(config)
        self._context = context
        self._url = url
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        announcement = asyncio.create_task(self._announce())
        try:
            await super().serve(sockets)
        finally:
            announcement.cancel()
            await self._context.lifecycle.stop()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """uvicorn's own would raise the signal again at the end, and the exit code would not be 0."""
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
            self._context.lifecycle.hurry()

    async def _drain_and_exit(self) -> None:
        """The port stays open while streams end, so that new requests are told 503 and not refused a connection."""
        lifecycle, timeout_s = self._context.lifecycle, self._context.settings.shutdown_timeout
        if num_left := lifecycle.num_under_way:
            logger.info("ending: %d requests may go on for %g s; a second signal ends at once", num_left, timeout_s)
        await lifecycle.drain(timeout_s)
        await lifecycle.stop()
        self.should_exit = True

    async def _announce(self) -> None:
        context = self._context
        state = await context.lifecycle.settled()
        if state is State.READY:
            say(ready_banner(context.settings, context.backend.engine.info, self._url))
        elif state is State.FAILED:
            self.should_exit = True
