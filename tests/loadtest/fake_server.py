"""A fake server in a thread, with known delays, counts and faults, in the formats of twostep's endpoints."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.loadtest import wire_formats


@dataclass
class FakeServer:
    """A fake server: its behaviour is set before or during a run, and what it received is read afterwards."""

    first_token_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_chunk: int = 1
    newline: str = "\n"
    prefix: str = ""  # before each event, a comment for example
    sends_usage: bool = True
    sends_done: bool = True
    sends_timings: bool = True
    sends_metrics: bool = True
    ends_with_empty_chunk: bool = False
    extra_completion_tokens: int = 0
    extra_prompt_tokens: int = 0
    counter_error: int = 0  # tokens that the generation counter counts too much per request
    claimed_ttft_ms: float = 0.5
    breaks_after_chunks: int | None = None
    error_after_chunks: int | None = None
    num_rejections: int = 0  # the first completions get a 429
    retry_after_s: float = 0.05
    failing_status: int | None = None  # every completion gets it
    num_fine: int = 0  # but the first ones
    probe: str = "/ready"
    num_not_ready: int = 0  # the first probes get a 503
    body_type: str = "text/event-stream"

    called_with: str | None = None  # the first token of each answer is a call of the tool f with these arguments
    num_cached: int = 0  # prompt tokens that usage calls cached

    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_in_flight: int = 0
    peak_in_flight: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    url: str = ""
    stop: Callable[[], object] = lambda: None  # from any thread: closes the port and every connection

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            method, path, _ = head[0].split(" ")
            if method == "POST" and path in wire_formats.PATHS:
                self.paths.append(path)
                self.bodies.append(json.loads(body))
                self.headers.append(headers)
                self.num_in_flight += 1
                self.peak_in_flight = max(self.peak_in_flight, self.num_in_flight)
                try:
                    if not self._is_refused(writer):
                        await self._complete(writer, path, self.bodies[-1])
                finally:
                    self.num_in_flight -= 1
            else:
                self._get(writer, path)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()

    def _get(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path == "/v1/models":
            _respond(writer, 200, json.dumps({"data": [{"id": "fake"}]}))
        elif path == "/metrics" and self.sends_metrics:
            lines = [
                "# TYPE twostep_generation_tokens_total counter",
                f"twostep_generation_tokens_total {self.generation_tokens}.0",
                f"twostep_prompt_tokens_total {self.prompt_tokens}.0",
                f"twostep_requests_running {self.num_in_flight}.0",
            ]
            _respond(writer, 200, "\n".join(lines))
        elif path == self.probe:
            self.num_not_ready -= 1
            _respond(writer, 200 if self.num_not_ready < 0 else 503, "{}")
        else:
            _respond(writer, 404, "{}")

    def _is_refused(self, writer: asyncio.StreamWriter) -> bool:
        if self.num_rejections > 0:
            self.num_rejections -= 1
            _respond(writer, 429, _error("slow down"), f"Retry-After: {self.retry_after_s}\r\n")
            return True
        if self.failing_status is not None and len(self.bodies) > self.num_fine:
            _respond(writer, self.failing_status, _error("no such thing"))
            return True
        return False

    async def _complete(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        await asyncio.sleep(self.first_token_s)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {self.body_type}\r\nTransfer-Encoding: chunked\r\n"
        if self.sends_timings:
            head += f"X-TTFT-Ms: {self.claimed_ttft_ms}\r\n"
        writer.write(f"{head}\r\n".encode())
        for event in wire_formats.first(path):
            self._event(writer, event)
        num_chunks = -(-wire_formats.num_asked(body) // self.tokens_per_chunk)
        for number in range(num_chunks):
            if number:
                await asyncio.sleep(self.gap_s)
            if number == self.breaks_after_chunks:
                return None
            if number == self.error_after_chunks:
                return self._end(writer, {"error": {"message": "the engine fell over"}})
            self._event(writer, self._chunk(path, body, is_last=number == num_chunks - 1))
        if self.ends_with_empty_chunk:
            self._event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self._end(writer, self._usage(path, body))

    def _chunk(self, path: str, body: dict[str, Any], is_last: bool) -> dict[str, Any]:
        if self.called_with is not None and not is_last:
            return wire_formats.call(path, self.called_with)
        chunk = wire_formats.token(path, " a", "length" if is_last and not self.ends_with_empty_chunk else None)
        return {**chunk, "timings": self._timings(body)} if is_last and self.sends_timings else chunk

    def _timings(self, body: dict[str, Any]) -> dict[str, float]:
        timings = {"ttft_ms": self.claimed_ttft_ms, "itl_ms": self.gap_s * 1000, "queue_ms": 0.25}
        return {**timings, "generated_tokens": wire_formats.num_asked(body) + self.extra_completion_tokens}

    def _usage(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        num_prompt = wire_formats.num_prompt_tokens(body) + self.extra_prompt_tokens
        num_completion = wire_formats.num_asked(body) + self.extra_completion_tokens
        self.prompt_tokens += num_prompt
        self.generation_tokens += num_completion + self.counter_error
        is_asked = path == "/v1/responses" or body.get("stream_options", {}).get("include_usage")
        if not (self.sends_usage and is_asked):
            return None
        timings = self._timings(body) if self.sends_timings else None
        output = wire_formats.output(" a" * wire_formats.num_asked(body), self.called_with)
        return wire_formats.usage(path, num_prompt, num_completion, self.num_cached, timings=timings, output=output)

    def _end(self, writer: asyncio.StreamWriter, last: dict[str, Any] | None) -> None:
        if last is not None:
            self._event(writer, last)
        if self.sends_done:
            self._write(writer, f"data: [DONE]{self.newline * 2}")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
        self._write(writer, f"{self.prefix}data: {json.dumps(content)}{self.newline * 2}")

    def _write(self, writer: asyncio.StreamWriter, text: str) -> None:
        data = text.encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _error(message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "t", "param": None, "code": "c"}})


def _respond(writer: asyncio.StreamWriter, status: int, body: str, headers: str = "") -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    writer.write(f"{head}{body}".encode())


async def _turns_of_the_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """Runs the fake server on a free port of 127.0.0.1 until the context ends."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stopped = asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(fake.answer, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stopped.wait()
        # A connection accepted just before close() would leak: so accepting ends first, then all that came get a task.
        loop.remove_reader(server.sockets[0].fileno())
        await _turns_of_the_loop()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _turns_of_the_loop()  # closed transports let go of their sockets

    def stop() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stopped.set)

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    fake.stop = stop
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(5)
    try:
        yield fake
    finally:
        stop()
        thread.join(5)
