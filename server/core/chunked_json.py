"""Large JSON lists, a slice at a time: the event loop stands still while one is encoded, and so do all streams.

Not in another thread: there the interpreter's lock would hold up each turn of the loop for some milliseconds.
"""

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

import msgspec

JsonT = TypeVar("JsonT", str, bytes)


async def json_of(part: Any) -> msgspec.Raw:
    """A part of an answer, such as one choice of many. Others have their turn after it."""
    encoded = msgspec.Raw(msgspec.json.encode(part))
    await asyncio.sleep(0)
    return encoded


async def json_list(items: Iterable[Any], slice_size: int) -> msgspec.Raw:
    """For use within what `msgspec.json.encode` takes. `items` may be lazy: what they take to make is sliced, too."""
    parts = await json_slices(items, slice_size, msgspec.json.encode)
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


async def json_slices(items: Iterable[Any], slice_size: int, encode: Callable[[list[Any]], JsonT]) -> list[JsonT]:
    """Without the brackets."""
    rest, parts = iter(items), list[JsonT]()
    while part := list(islice(rest, slice_size)):
        parts.append(encode(part)[1:-1])
        if len(part) == slice_size:
            await asyncio.sleep(0)
    return parts
