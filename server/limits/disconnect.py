"""Cancels the work for a request when its client disconnects before the response begins: until then the web framework
does not watch for that."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed the connection before its response began."""


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work`, waits for its end and raises
    ClientLeftError.

    The request's body must have been read, so that what arrives next can only be the disconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        await ended(working, leaving)


async def ended(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels tasks and waits for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def disconnect(receive: Receive) -> None:
    """Waits until the client has disconnected, or the response is complete. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
