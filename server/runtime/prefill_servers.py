"""Asks prefill servers for prompts, over HTTP: POST /v1/prefill, which answers when the prompt's blocks are stored.

The choice among several is the routers' own: the longest prefix that was sent there, and what it has to do yet.
"""

import time
from collections import Counter
from collections.abc import Sequence

import httpx
import msgspec

from engine.client.prefill_servers import Prefix
from engine.core.errors import RemotePrefillError
from engine.core.generation_request import GenerationRequest
from server.core.promises import TTFT_HEADER
from server.routing.policy import PrefixAwarePolicy
from server.routing.prompt_digests import prompt_of_tokens
from server.routing.replica_loads import ReplicaLoad

_CONNECT_S = 2.0
_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0  # in which a server that failed is not asked again


class _Answer(msgspec.Struct):
    stored_tokens: int


class HttpPrefillServers:
    """Implements `PrefillServers`. Used on one event loop only."""

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str | None,
        min_tokens: int,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` takes the place of the network in tests."""
        self.min_tokens = min_tokens
        self._timeout_s = timeout_s
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            headers=headers,
            limits=limits,
            transport=transport,
            trust_env=False,  # prompts and keys are no matter of a proxy's
        )
        self._policy = PrefixAwarePolicy()
        self._urls = [url.rstrip("/") for url in urls]
        for url in self._urls:
            self._policy.add(url)
        self._tokens = Counter[str]()  # that each server was asked for and has not answered yet
        self._pause_s = dict.fromkeys(self._urls, 0.0)
        self._again_s = dict.fromkeys(self._urls, 0.0)

    async def compute(self, prefix: Prefix) -> int:
        """Asks one server after the other until one has computed the prefix, or time is over. Raises
        RemotePrefillError."""
        prompt = prompt_of_tokens(prefix.token_ids, f"{prefix.request.cache_salt}\0{prefix.request.adapter}")
        now_s = time.monotonic()
        failed = {url for url in self._urls if self._again_s[url] > now_s}
        problem = "No prefill server is up."
        while (left_s := now_s + self._timeout_s - time.monotonic()) > 0:
            if (url := self._policy.choose(prompt, failed)) is None:
                break
            self._policy.sent(prompt, url)
            self._tokens[url] += len(prefix.token_ids)
            try:
                return await self._ask(url, prefix, left_s)
            except RemotePrefillError as error:
                problem = str(error)
                failed.add(url)
            finally:
                self._tokens[url] -= len(prefix.token_ids)
                self._policy.report(url, ReplicaLoad(waiting_tokens=self._tokens[url]))
        raise RemotePrefillError(problem)

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, url: str, prefix: Prefix, timeout_s: float) -> int:
        """Returns what one server stored. One that is not there, or fails, is left alone for a while, which doubles
        if it fails again after that; one that refuses may take the next prompt."""
        asked_s = time.monotonic()
        try:
            body, timeout = msgspec.json.encode(_body(prefix)), httpx.Timeout(timeout_s, connect=_CONNECT_S)
            headers = {**prefix.request.trace_headers, **_promises(prefix.request), **_JSON}
            answer = await self._http.post(f"{url}/v1/prefill", content=body, headers=headers, timeout=timeout)
            if answer.status_code < 500:
                self._pause_s[url] = 0.0
            if answer.status_code == 200:
                num_stored = msgspec.json.decode(answer.content, type=_Answer).stored_tokens
                return min(max(num_stored, 0), len(prefix.token_ids))
            problem = f"answers {answer.status_code}: {answer.text[:500]}"
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            problem = f"does not answer: {type(error).__name__} {error}".rstrip()
            answer = None
        if (answer is None or answer.status_code >= 500) and asked_s >= self._again_s[url]:
            self._pause_s[url] = min(max(2 * self._pause_s[url], _PAUSE_S), _MAX_PAUSE_S)
            self._again_s[url] = time.monotonic() + self._pause_s[url]
        raise RemotePrefillError(f"The prefill server {url} {problem}.")


_JSON = {"Content-Type": "application/json"}


def _promises(request: GenerationRequest) -> dict[str, str]:
    """Returns the header with the time that is left for a first token, if the client asks for one."""
    left_s = request.ttft_left_s
    return {} if left_s is None else {TTFT_HEADER: f"{max(left_s * 1e3, 1):.0f}"}


def _body(prefix: Prefix) -> dict[str, object]:
    """Returns the body of a request: see `server.protocol.prefill`. Tenants keep their shares there."""
    request: GenerationRequest = prefix.request
    left_s = request.left_s
    return {
        "token_ids": prefix.token_ids,
        "stored_tokens": prefix.num_stored_tokens,
        "kv_fingerprint": prefix.kv_fingerprint,
        "cache_salt": request.cache_salt,
        "adapter": request.adapter,
        "priority": request.priority,
        "tenant": request.tenant,
        "weight": request.weight,
        "share": request.share,
        "max_queue_ms": None if request.max_queue_s is None else max(round(request.max_queue_s * 1e3), 1),
        "deadline_ms": None if left_s is None else max(round(left_s * 1e3), 1),
    }
