"""The app behind a real socket, in a thread: streaming and leaving early cannot be seen without one."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.client.observer import EngineObserver
from engine.grammar.checker import GrammarChecker
from server.app import create_app
from server.listener import listen
from server.runtime.backend import AdmissionSize, Backend, OpenBackend
from server.runtime.context import AppContext
from server.runtime.generation_defaults import GenerationDefaults
from server.serve import DrainingServer, server_config
from server.settings.settings import Settings
from server.templates.setting import chat_renderer
from tests.server.byte_tokenizer import CHAT_TEMPLATE, ByteTokenizer
from tests.server.fake_engine import FakeEngine

TIMEOUT_S = 20.0


@dataclass
class FakeBackend:
    """The backend that `create_app` opens in tests. Loading can be held up or made to fail."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    special_tokens: dict[str, int] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=lambda: {"default": CHAT_TEMPLATE})
    is_loading: bool = False
    failure: Exception | None = None

    def opener(self, settings: Settings) -> OpenBackend:
        @asynccontextmanager
        async def open_backend(observer: EngineObserver) -> AsyncGenerator[Backend, None]:
            self.engine.observer = observer
            while self.is_loading:
                await asyncio.sleep(0.002)
            if self.failure is not None:
                raise self.failure
            limits = settings.engine_config().limits_on(self.engine.info.device)
            size = AdmissionSize(limits.max_num_seqs, settings.max_waiting, settings.max_waiting_tokens)
            tokenizer = self.engine.tokenizer = ByteTokenizer(self.chat_templates, self.special_tokens)
            chat = chat_renderer(tokenizer, settings)
            grammars = GrammarChecker()
            yield Backend(self.engine, tokenizer, chat, self.defaults, size, grammars, loaded_at=1_700_000_000)
            grammars.close()
            self.engine.stop()

        return open_backend


@dataclass
class LiveServer:
    client: httpx.Client
    engine: FakeEngine
    backend: FakeBackend
    server: DrainingServer
    context: AppContext
    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, prompt: Any = "Hi", headers: dict[str, str] | None = None, **parameters: Any) -> httpx.Response:
        return self.post("/v1/completions", json.dumps({"prompt": prompt, **parameters}), headers)

    def chat(self, messages: Any = "Hi", headers: dict[str, str] | None = None, **parameters: Any) -> httpx.Response:
        """A text is the one message of a user."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.post_json("/v1/chat/completions", {"messages": messages, **parameters}, headers)

    def post_json(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        return self.post(path, json.dumps(body), headers)

    def respond(self, input: Any = "Hi", headers: dict[str, str] | None = None, **parameters: Any) -> httpx.Response:
        return self.post("/v1/responses", json.dumps({"input": input, **parameters}), headers)

    def message(self, messages: Any = "Hi", headers: dict[str, str] | None = None, **parameters: Any) -> httpx.Response:
        """A text is the one message of a user."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"messages": messages, "max_tokens": 16, **parameters}
        return self.post("/v1/messages", json.dumps(body), headers)

    def ollama(self, prompt: Any = "Hi", headers: dict[str, str] | None = None, **parameters: Any) -> httpx.Response:
        """Asks /api/generate; a list of messages asks /api/chat. Not streamed unless `parameters` say so."""
        name, path = ("prompt", "generate") if isinstance(prompt, str) else ("messages", "chat")
        return self.post_json(f"/api/{path}", {name: prompt, "stream": False, **parameters}, headers)

    def post(self, path: str, body: str | bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.client.post(path, content=body, headers={"Content-Type": "application/json", **(headers or {})})

    def request_bytes(self, path: str, body: dict[str, Any]) -> bytes:
        """Returns a request as it goes over the wire, for clients that leave or do not read."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S, source_address=(source, 0))

    def call(self, function: Callable[[], Any]) -> None:
        """Runs the function on the server's event loop."""
        self.loop.call_soon_threadsafe(function)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition)

    def wait_until_idle(self) -> None:
        wait_until(lambda: self.engine.num_live == 0 and self.context.lifecycle.num_under_way == 0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@contextmanager
def live_server(backend: FakeBackend | None = None, **settings: Any) -> Generator[LiveServer, None, None]:
    """Runs a server with these settings over this backend; it is ready unless the backend is still loading or
    failed."""
    backend = backend or FakeBackend()
    parsed = Settings(**{"served_model_name": ["fake"], **settings})
    app = create_app(parsed, backend.opener(parsed))
    context: AppContext = app.state.context
    listener = listen("127.0.0.1", 0, parsed.stall_timeout)
    port = listener.getsockname()[1]
    server = DrainingServer(server_config(app, context), context, f"http://127.0.0.1:{port}")
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
        if not backend.is_loading and backend.failure is None:
            wait_until(lambda: context.lifecycle.state != "loading")
        try:
            yield LiveServer(client, backend.engine, backend, server, context, port, loops[0])
        finally:
            backend.is_loading = False
            server.should_exit = True
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
