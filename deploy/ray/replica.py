"""One replica: the server itself, as a child process, and an actor of Ray that hands requests on to it."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ray import serve

from deploy.ray.roles import Role

_LISTENS = "  listens "  # begins the line of the server's banner that has its address


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request as it goes to a replica."""

    method: str
    path: str
    """With its query."""
    headers: Sequence[tuple[str, str]]
    body: bytes

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]


@dataclass(frozen=True, slots=True)
class Head:
    """What comes of a replica first: who it is, and how its answer begins."""

    replica: str
    status: int
    headers: Sequence[tuple[str, str]]


class Replica:
    """Runs the server in a process of its own: the same program with the same flags as without Ray, with its limits,
    metrics and restarts of the engine. In the actor's process, event loop, signals and connections would be Ray's."""

    def __init__(self, arguments: Sequence[str], role: Role) -> None:
        """Starts the server, and waits until its model is loaded. Raises RuntimeError if it ends instead."""
        self._name = serve.get_replica_context().replica_id.unique_id
        child = [sys.executable, "-m", "deploy.ray.child", str(os.getpid())]
        flags = [*role.flags, *self._key_flags(role), "--host", "127.0.0.1", "--port", "0"]
        self._process = subprocess.Popen(
            [*child, "serve", *arguments, *flags],
            env={**os.environ, **role.environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        url = self._wait_for_address()
        self._is_wanted = True
        threading.Thread(target=self._end_with_server, daemon=True).start()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(None, connect=10), limits=limits)

    async def forward(self, call: Call, **_: Any) -> AsyncGenerator[str | Head | bytes, None]:
        """Yields this replica's name at once, then the head and the bytes of the server's answer. Other arguments are
        for the request router."""
        yield self._name
        request = self._client.build_request(call.method, call.path, headers=list(call.headers), content=call.body)
        response = await self._client.send(request, stream=True)
        try:
            yield Head(self._name, response.status_code, list(response.headers.items()))
            async for data in response.aiter_raw():
                yield data
        finally:
            await response.aclose()  # a client that left aborts its request

    async def answer(self, call: Call) -> tuple[Head, bytes]:
        """Returns the head and the body of the server's answer."""
        response = await self._client.request(call.method, call.path, headers=list(call.headers), content=call.body)
        return Head(self._name, response.status_code, list(response.headers.items())), response.content

    async def check_health(self) -> None:
        """Raises if the server gave its engine up: Ray then replaces the replica."""
        (await self._client.get("/health", timeout=10)).raise_for_status()

    async def record_routing_stats(self) -> dict[str, Any]:
        return dict((await self._client.get("/load", timeout=10)).json())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        load = await self.record_routing_stats()
        return {"waiting_tokens": load["waiting_tokens"], "sequences": load["server_load"]}

    def __del__(self) -> None:
        self._is_wanted = False
        if hasattr(self, "_process") and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _key_flags(self, role: Role) -> list[str]:
        """Writes the role's keys where only this user reads them, as long as this replica lives."""
        if not role.keys_file:
            return []
        self._folder = tempfile.TemporaryDirectory(prefix="twostep-")
        path = Path(self._folder.name) / "keys.yaml"
        path.write_text(role.keys_file, encoding="utf-8")
        return ["--api-keys-file", str(path)]

    def _wait_for_address(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_LISTENS):
                threading.Thread(target=self._pass_on_output, daemon=True).start()
                return line.split()[1]
        raise RuntimeError(f"the server ended with code {self._process.wait()} before it was ready")

    def _end_with_server(self) -> None:
        """Ends the actor's process when the server's ends: Ray sends it no more requests then, and replaces it. To an
        actor whose health checks fail it would go on sending them until the third has."""
        code = self._process.wait()
        if self._is_wanted:
            print(f"the server ended with code {code}", flush=True)
            os._exit(1)

    def _pass_on_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(line, end="", flush=True)
