"""JSON encoding of large lists, a slice at a time: encoding blocks the event loop, and with it all streams.

Tried and left: encoding in another thread. The GIL then delays each turn of the event loop by some milliseconds.
"""

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

import msgspec

JsonT = TypeVar("JsonT", str, bytes)


async def json_list(items: Iterable[Any], slice_size: int) -> msgspec.Raw:
    """Returns the items as a JSON list that `msgspec.json.encode` copies as it is. Yields to the event loop after every
    `slice_size` items; where `items` is an iterator, making them is sliced, too."""
    parts = await json_slices(items, slice_size, msgspec.json.encode)
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


async def json_slices(items: Iterable[Any], slice_size: int, encode: Callable[[list[Any]], JsonT]) -> list[JsonT]:
    """Returns the JSON of each slice of `slice_size` items, without the list's brackets."""
    rest, parts = iter(items), list[JsonT]()
    while part := list(islice(rest, slice_size)):
        parts.append(encode(part)[1:-1])
        if len(part) == slice_size:
            await asyncio.sleep(0)
    return parts
