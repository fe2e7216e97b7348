"""Sends one request and returns its Record.

Every request has a connection of its own: over a reused one, a request may be lost to a server that closes an idle
connection in the same moment. The TTFT is measured from after the handshake.
"""

import asyncio
import json
import time
from typing import Protocol

from loadtest.endpoints import COLLECTORS, PATHS, WireOptions, request_body
from loadtest.reader import ResponseReader
from loadtest.record import Outcome, Record, Reply
from loadtest.target import CONNECT_TIMEOUT_S, Target, connect_failure
from loadtest.workload import RequestSpec

_DEFAULT_RETRY_AFTER_S = 1.0


class Sender(Protocol):
    """Sends one request and returns its Record when it has ended, however it ended. `due_s` is when it was to be
    sent."""

    async def __call__(self, spec: RequestSpec, due_s: float | None = None) -> Record: ...


class StreamingClient:
    """A Sender of streaming requests to one endpoint of one target."""

    def __init__(self, target: Target, options: WireOptions, keeps_answers: bool = False) -> None:
        self._target = target
        self._options = options
        self._keeps_answers = keeps_answers
        self._head = self._request_head()

    async def __call__(self, spec: RequestSpec, due_s: float | None = None) -> Record:
        """Sends the request, with `retry_429` again after each 429. The time limit covers all attempts together; only a
        handshake has a limit of its own."""
        began_s = time.perf_counter()
        deadline_s = began_s + self._options.timeout_s
        message = self._message(spec)
        num_retries, retry_wait_s = 0, 0.0
        while True:
            reply = await self._attempt(message, deadline_s)
            wait_s = reply.retry_after_s if reply.retry_after_s is not None else _DEFAULT_RETRY_AFTER_S
            is_late = reply.ended_s + wait_s > deadline_s
            if reply.outcome is not Outcome.REJECTED or not self._options.retry_429 or is_late:
                break
            await asyncio.sleep(wait_s)
            num_retries, retry_wait_s = num_retries + 1, time.perf_counter() - reply.ended_s + retry_wait_s
        return Record(
            group=spec.group,
            max_tokens=spec.max_tokens,
            began_s=began_s,
            reply=reply,
            send_lag_s=None if due_s is None else began_s - due_s,
            num_retries=num_retries,
            retry_wait_s=retry_wait_s,
            turn=spec.turn,
            num_prompt_tokens=len(spec.prompt) if isinstance(spec.prompt, list) else None,
        )

    async def _attempt(self, message: bytes, deadline_s: float) -> Reply:
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                transport, reader = await self._connect()
        except OSError as error:
            return Reply(Outcome.CONNECT_ERROR, began_s, time.perf_counter(), message=connect_failure(error))
        sent_s = time.perf_counter()
        outcome, why = None, ""
        try:
            transport.write(message)
            async with asyncio.timeout(deadline_s - sent_s):
                await reader.ended
        except TimeoutError:
            outcome, why = Outcome.TIMEOUT, f"no end within {self._options.timeout_s:g} s"
        finally:
            transport.abort()  # at the end of a response nothing is left to flush
        if outcome is None:
            outcome, why = reader.verdict()
        return Reply(
            outcome=outcome,
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            status=reader.response.status,
            message=why,
            retry_after_s=reader.retry_after_s,
            connect_s=sent_s - began_s,
            arrivals_s=reader.collector.arrivals_s,
            usage=reader.collector.usage,
            server_ms=reader.server_ms,
            answer=reader.collector.answer(),
        )

    async def _connect(self) -> tuple[asyncio.Transport, ResponseReader]:
        target, options = self._target, self._options
        transport, reader = await asyncio.get_running_loop().create_connection(
            lambda: ResponseReader(COLLECTORS[options.endpoint](options.expects_done, self._keeps_answers)),
            target.address,
            target.port,
            ssl=target.tls,
            server_hostname=target.host if target.tls else None,
        )
        return transport, reader

    def _request_head(self) -> str:
        headers = {
            "host": self._target.host_header,
            "user-agent": "twostep-loadtest",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "connection": "close",
            **self._options.request_headers(),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {self._target.path}{PATHS[self._options.endpoint]} HTTP/1.1\r\n{lines}"

    def _message(self, spec: RequestSpec) -> bytes:
        content = json.dumps(request_body(self._options, spec), separators=(",", ":")).encode()
        return f"{self._head}content-length: {len(content)}\r\n\r\n".encode("latin-1") + content
