"""When the server process looks for garbage among all of its objects, which holds up the event loop: half a microsecond
per object, of which a stream under way has some three hundred."""

import asyncio
import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["collecting_while_idle"]

PAUSE_S = 1.0
NUM_DUE = 10  # collections of younger objects, after which Python looks at all, unless told otherwise
NUM_POSTPONED = 100


@contextmanager
def collecting_while_idle(is_idle: Callable[[], bool]) -> Generator[None, None, None]:
    """Makes full collections as soon as they are due and nothing is under way. Beside requests they are ten times rarer
    than by default: few requests leave reference cycles, and these are of some kilobytes."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NUM_POSTPONED)
    collecting = asyncio.create_task(_collect(is_idle))
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(young, middle, old)


async def _collect(is_idle: Callable[[], bool]) -> None:
    while True:
        await asyncio.sleep(PAUSE_S)
        if gc.get_count()[2] >= NUM_DUE and is_idle():
            gc.collect()
