"""An event loop whose time passes only where it would sleep: no pause of the machine comes between its timers."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_ResultT = TypeVar("_ResultT")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Selector(self._pass_time))

    def time(self) -> float:
        return self._now_s

    def _pass_time(self, seconds: float) -> None:
        self._now_s += seconds


class _Selector(selectors.DefaultSelector):
    """A selector that sleeps only where no timer is due, such as for a thread; else it moves the loop's time."""

    def __init__(self, pass_time: Callable[[float], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if timeout is not None and not ready:
            self._pass_time(timeout)
        return ready


def run(coroutine: Coroutine[Any, Any, _ResultT]) -> _ResultT:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
