"""Routes with JSON bodies, read strictly: the media type must be JSON's, and what cannot be parsed is refused with the
reason. Large bodies wait for their turn."""

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from server.core.errors import BadRequestError, MediaTypeError
from server.core.request_record import caller_of, name_request
from server.limits.disconnect import unless_client_leaves
from server.limits.large_bodies import LARGE_BYTES, LargeBodies, is_large
from server.protocol.wire import MAX_FIELDS
from server.runtime.context import context_of

MAX_CONTAINERS = 100_000
"""Maximum number of lists and objects in a large body; brackets within strings count, so more are allowed where they
are sparse as in text: one in 16 bytes. Made of nothing but empty lists, a body would take ten times as long as one of
numbers."""
MAX_NAMES = 2**18
"""Maximum number of names in the objects of a large body; colons within strings count, with the same allowance."""

_FORM = "application/x-www-form-urlencoded"

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRequest(Request):
    """A request whose body is read when it is asked for, in its turn if it is large."""

    def __init__(self, request: Request, large_bodies: LargeBodies, exit_stack: AsyncExitStack) -> None:
        """`exit_stack` releases the body's slot among the large ones."""
        super().__init__(request.scope, request.receive)
        self._large_bodies = large_bodies
        self._exit_stack = exit_stack

    async def body(self) -> bytes:
        if is_large(self.headers) and not hasattr(self, "_body"):
            messages, num_bytes = await _beginning(self._receive)
            self._receive = _again(messages, self._receive)
            if num_bytes >= LARGE_BYTES:
                await self._exit_stack.enter_async_context(self._large_bodies.slot(caller_of(self.scope)))
        return await super().body()

    async def json(self) -> Any:
        body = await self.body()
        if len(body) >= LARGE_BYTES:
            await self._large_bodies.wait_to_parse(len(body))
            _pause_collector()
        try:
            value = _parse(body)
        except (ValueError, msgspec.MsgspecError) as error:
            raise BadRequestError(f"The body is not valid JSON: {error}.") from error
        except RecursionError:
            raise BadRequestError("The body's JSON is nested too deeply.") from None
        finally:
            await self._exit_stack.aclose()
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise BadRequestError(f"The body has {len(value)} fields; at most {MAX_FIELDS} are read.")
        if isinstance(value, dict) and isinstance(value.get("request_id"), str):
            name_request(self.scope, value["request_id"])
        return value


async def _beginning(receive: Receive) -> tuple[list[Message], int]:
    """Returns the messages until the body is large or at its end, and the number of their bytes: a client that sends
    little takes no slot of a large body."""
    messages, num_bytes, has_more = list[Message](), 0, True
    while has_more and num_bytes < LARGE_BYTES:
        messages.append(await receive())
        num_bytes += len(messages[-1].get("body", b""))
        has_more = messages[-1].get("more_body", False)
    return messages, num_bytes


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Returns a `receive` of these messages once more, then of those that follow."""
    kept = messages[::-1]

    async def receive_again() -> Message:
        return kept.pop() if kept else await receive()

    return receive_again


def _parse(body: bytes) -> Any:
    """Returns the parsed body. The event loop stands still for this, so large bodies get the faster parser: a fifth of
    the time for lists of numbers. It takes neither NaN nor lone surrogates; json does, and leaves it to validation to
    name the field.
    """
    if len(body) < LARGE_BYTES:
        return json.loads(body.decode())
    if body.count(b"[") + body.count(b"{") > max(MAX_CONTAINERS, len(body) // 16):
        raise BadRequestError("The body's JSON has too many lists and objects.")
    if body.count(b":") > max(MAX_NAMES, len(body) // 16):
        raise BadRequestError("The body's JSON has too many names in its objects.")
    return msgspec.json.decode(body)


def _pause_collector() -> None:
    """Pauses the garbage collector until the loop's next turn, which comes behind validation and translation, too:
    millions of small values would make it look at all of them again and again."""
    gc.disable()
    asyncio.get_running_loop().call_soon(gc.enable)


class JsonRoute(APIRoute):
    """A route whose requests have a JSON body. The parsed body is validated by FastAPI as for any route.

    From the body's end until there is a response, whatever the handler does ends when the client leaves.
    """

    takes_form_type = False
    """Whether JSON may come as what curl takes a body for if it is told nothing. Web pages may not: they could send it
    to any server without asking."""

    def check(self, request: Request) -> None:
        """Raises errors that are known before the body is read."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            self.check(request)
            if request.method == "POST":
                self._check_media_type(request)
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ("", "identity"):
                raise MediaTypeError(f"Content-Encoding {encoding[:20]!r} is not supported; send the body as it is.")
            async with AsyncExitStack() as exit_stack:
                json_request = JsonRequest(request, context_of(request).large_bodies, exit_stack)
                await json_request.body()  # FastAPI would make a 400 of whatever is raised here
                return await unless_client_leaves(json_request.receive, handle(json_request))

        return handle_json

    def _check_media_type(self, request: Request) -> None:
        """Raises MediaTypeError unless the body is, or may be taken to be, declared as JSON, as it is from then on."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type == _FORM and self.takes_form_type and "origin" not in request.headers:
            others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
            request.scope["headers"] = [*others, (b"content-type", b"application/json")]
        elif media_type != "application/json":
            raise MediaTypeError("The body must be JSON; send the header Content-Type: application/json.")
