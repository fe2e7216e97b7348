"""The application's front: speaks HTTP, has the request router choose replicas, and sees streams through."""

import asyncio
import hashlib
import json
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deploy.ray.replica import Call, Head
from deploy.ray.roles import PREFILL_PATH
from server.routing.continuation import (
    LINE_PATHS,
    PATHS,
    Events,
    ForeignReplicaError,
    StreamContinuation,
    error_event,
)
from server.routing.line_continuation import LineContinuation
from server.routing.merged_metrics import merged_metrics
from server.routing.moves import Moves, NoReplicaError, ReplicaLostError
from server.routing.policy import RoutedPrompt
from server.routing.prompt_digests import routed_prompt, routed_tokens
from server.routing.typed_continuation import TYPED_PATHS, TypedContinuation

_OVERLOADED = frozenset({429, 503, 529})  # statuses of replicas that are full, or about to end
_HOP_BY_HOP = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "te"})
_RAYS = frozenset({"date", "server", "x-request-id"})  # headers that its proxy adds itself
_LOST = "The replica that had this request is gone, and no other could take it over; try again."
_GONE = (RayError, RayServeException)  # a replica, or all of a deployment's
_NONE = "There is no replica that could do it; try again."
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_FOR_ALL = ("/metrics", "/reset_prefix_cache", *_ADAPTERS)

Answer = tuple[Head, bytes]

Continuation = StreamContinuation | TypedContinuation | LineContinuation
_CONTINUATIONS: Mapping[str, Callable[[dict[str, Any]], Continuation]] = {
    **dict.fromkeys(PATHS, StreamContinuation),
    **dict.fromkeys(TYPED_PATHS, TypedContinuation),
    **dict.fromkeys(LINE_PATHS, LineContinuation),
}

Parts = AsyncGenerator[Head | bytes, None]
"""The head of an answer, and then the bytes of its body."""


class Gateway:
    """Hands requests to replicas. Streams go on when their replica dies; other requests are sent again as long as
    nothing of their answer was sent."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        max_body_bytes: int,
        wait_s: float,
        prefills: DeploymentHandle | None = None,
        prefill_key: str = "",
    ) -> None:
        """`wait_s` bounds how long a request waits for a replica. `prefills` compute prompts for the replicas, which
        have `prefill_key`."""
        self._replicas = replicas
        self._streams = replicas.options(stream=True)
        self._prefills = prefills
        self._prefill_streams = None if prefills is None else prefills.options(stream=True)
        self._max_body_bytes = max_body_bytes
        self._wait_s = wait_s
        self._prefill_credentials = f"Bearer {prefill_key}".encode()

    async def __call__(self, request: Request) -> Response:
        body = await _body_of(request, self._max_body_bytes)
        if body is None:
            return _refused(413, "request_too_large", f"The body has more than {self._max_body_bytes} bytes.")
        call = _call_of(request, body)
        if call.route in _FOR_ALL or request.method == "DELETE":
            return await self._ask_all(call)
        parsed = _object(body)
        if call.route == PREFILL_PATH and self._prefills is not None:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not secrets.compare_digest(given, self._prefill_credentials):
                return _refused(401, "invalid_api_key", "This path is for the application's own replicas.")
        is_streamed = parsed.get("stream", call.route in LINE_PATHS) is True
        if is_streamed and (continuation := _CONTINUATIONS.get(call.route)) is not None:
            return await _response(self._continued(call, parsed, continuation(parsed)))
        return await _response(self._retried(call, parsed))

    async def _ask_all(self, call: Call) -> Response:
        """Has every replica do it. The answer is that of the first one that could, or all their metrics; an error where
        only some of them changed their adapters."""
        answers, num_lost = await _answers(self._replicas, call)
        if call.route == "/metrics":
            if self._prefills is not None:
                answers += (await _answers(self._prefills, call))[0]
            texts = {head.replica: body.decode() for head, body in answers if head.status == 200}
            return Response(merged_metrics(texts), media_type="text/plain; version=0.0.4; charset=utf-8")
        if not answers:
            return _refused(503, "server_is_overloaded", _NONE)
        head, body = min(answers, key=lambda answer: answer[0].status)
        if call.route in _ADAPTERS and head.status == 200 and (failures := _failures(answers, num_lost)):
            return _refused(503, "adapters_differ", failures)
        return Response(body, head.status, dict(_shown(head)))

    async def _retried(self, call: Call, parsed: dict[str, Any]) -> Parts:
        """Yields the parts of a replica's answer; those of another replica if it dies before the body begins. Raises
        ReplicaLostError if it dies later: half a body must not seem whole."""
        moves, has_begun = Moves(self._wait_s), False
        while not has_begun and await moves.may_try():
            try:
                async with aclosing(self._stream(call, parsed, moves)) as parts:
                    head = await anext(parts)
                    async for part in parts:
                        if not has_begun:
                            yield head
                        has_begun = True
                        yield part
                if not has_begun:
                    yield head
                return
            except ReplicaLostError as error:
                moves.fail(error)
                if has_begun:
                    raise

    async def _continued(self, call: Call, parsed: dict[str, Any], stream: Continuation) -> Parts:
        """Yields a head and the events of a stream, whichever replicas they come from."""
        moves, has_begun = Moves(self._wait_s), False
        while await moves.may_try():
            try:
                async with aclosing(self._attempt(call, parsed, stream, moves)) as parts:
                    head = await anext(parts)
                    async for part in parts:
                        if not has_begun:
                            yield head
                        has_begun = True
                        moves.progress()
                        yield part
                return
            except ReplicaLostError as error:
                moves.fail(error)
            except ForeignReplicaError:
                break
        if has_begun:
            yield error_event(call.route, _LOST)

    async def _attempt(self, call: Call, parsed: dict[str, Any], stream: Continuation, moves: Moves) -> Parts:
        """Yields a replica's head, and what the client has not got yet of its stream; a refusal as it is. Raises
        ReplicaLostError if the stream breaks off, or begun ones are refused, as full replicas do."""
        body = json.dumps(stream.next_body()).encode()
        events, is_refusal = Events(stream.separator), False
        sent = Call(call.method, call.path, call.headers, body)
        async with aclosing(self._stream(sent, parsed, moves)) as parts:
            async for part in parts:
                if isinstance(part, Head):
                    if (is_refusal := part.status != 200) and stream.has_begun:
                        raise NoReplicaError if part.status in _OVERLOADED else ReplicaLostError
                    yield part
                elif is_refusal:
                    yield part
                else:
                    for event in events.split(part):
                        if (new := stream.take(event)) is not None:
                            yield new + stream.separator
        if not (is_refusal or stream.is_done):
            raise ReplicaLostError

    async def _stream(self, call: Call, parsed: dict[str, Any], moves: Moves) -> Parts:
        """Yields what one replica answers: a head first. Raises NoReplicaError if none takes the request in time, and
        ReplicaLostError if one dies of it."""
        streams, prompt = self._asked(call, parsed)
        parts = streams.forward.remote(call, prompt=prompt, excluded=tuple(moves.excluded[-8:]))
        lost: type[ReplicaLostError] = NoReplicaError
        try:
            async with asyncio.timeout(moves.left_s):
                moves.take(await anext(parts))
            lost = ReplicaLostError
            async for part in parts:
                yield part
        except (*_GONE, TimeoutError) as error:
            raise lost from error
        finally:
            parts.cancel()  # of no consequence once it has ended

    def _asked(self, call: Call, parsed: dict[str, Any]) -> tuple[DeploymentHandle, RoutedPrompt]:
        """Returns who is to answer, and what the request router is told of the prompt."""
        if call.route == PREFILL_PATH and self._prefill_streams is not None:
            return self._prefill_streams, routed_tokens(parsed)
        return self._streams, routed_prompt(parsed, _caller(call))


async def _response(parts: Parts) -> Response:
    """Returns the response that begins with the first part, a head."""
    try:
        head = await anext(parts)
    except StopAsyncIteration:
        return _refused(503, "server_is_overloaded", _LOST)
    assert isinstance(head, Head)

    async def data() -> AsyncGenerator[bytes, None]:
        async with aclosing(parts):
            async for part in parts:
                assert isinstance(part, bytes)
                yield part

    return StreamingResponse(data(), head.status, dict(_shown(head)))


async def _answers(replicas: DeploymentHandle, call: Call) -> tuple[list[Answer], int]:
    """Has all replicas of a deployment answer, and returns their answers and how many died instead."""
    try:
        results = await replicas.broadcast("answer", call).results_async(return_exceptions=True)
    except _GONE:
        return [], 0
    lost = [each for each in results if isinstance(each, BaseException)]
    for error in lost:
        if not isinstance(error, _GONE):
            raise error
    return [each for each in results if not isinstance(each, BaseException)], len(lost)


def _failures(answers: Sequence[Answer], num_lost: int) -> str:
    """Returns which replicas did not change their adapters, and why; an empty text if none. One that has no adapter of
    that name has none to unload."""
    failed = [f"{head.replica}: {body.decode()}" for head, body in answers if head.status not in (200, 404)]
    failed += [f"{num_lost} were lost"] * (num_lost > 0)
    num_done = sum(head.status == 200 for head, _ in answers)
    return f"Only {num_done} replicas did it. " + "; ".join(failed) if failed else ""


async def _body_of(request: Request, max_bytes: int) -> bytes | None:
    """Returns the request's body; None if that is too large."""
    parts, num_bytes = [], 0
    async for part in request.stream():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            return None
    return b"".join(parts)


def _call_of(request: Request, body: bytes) -> Call:
    """Returns the request for a replica. All replicas that get it know it by one id."""
    headers = [(name, value) for name, value in request.headers.items() if name not in _HOP_BY_HOP]
    if "x-request-id" not in request.headers:
        headers.append(("x-request-id", uuid.uuid4().hex))
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return Call(request.method, path, headers, body)


def _object(body: bytes) -> dict[str, Any]:
    """Returns a body that is a JSON object; an empty one for all that is not, which replicas refuse."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _caller(call: Call) -> str:
    """Returns who shares cached prefixes: whoever has the same key."""
    headers = dict(call.headers)
    key = headers.get("authorization", "") + headers.get("x-api-key", "")
    return hashlib.sha256(key.encode()).hexdigest()


def _shown(head: Head) -> list[tuple[str, str]]:
    return [(name, value) for name, value in head.headers if name not in _HOP_BY_HOP | _RAYS]


def _refused(status: int, code: str, message: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, {"Retry-After": "1"} if status == 503 else None)
