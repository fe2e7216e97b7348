"""Notices when an engine that has work sends nothing for too long."""

import asyncio
import time
from collections.abc import Callable


class Watchdog:
    """Checks from time to time while there is work, and not at all while there is none."""

    def __init__(self, max_silence_s: float, has_work: Callable[[], bool], on_hang: Callable[[], None]) -> None:
        self._max_silence_s = max_silence_s
        self._has_work = has_work
        self._on_hang = on_hang
        self._reset_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def silence_s(self) -> float:
        """Seconds for which the engine has sent nothing although it has work."""
        return time.monotonic() - self._reset_at_s if self._has_work() else 0.0

    @property
    def complaint(self) -> str:
        """Says for how long the engine has been silent."""
        return f"The engine has work but was silent for {self.silence_s:.0f} seconds."

    @property
    def is_silent(self) -> bool:
        """Whether the engine has been silent for too long."""
        return self.silence_s > self._max_silence_s

    def reset(self) -> None:
        """End the silence. Call when the engine sent something, and when it begins to have work."""
        self._reset_at_s = time.monotonic()

    def begin(self) -> None:
        """Start to check anew. Call when there is work after there was none."""
        self.reset()
        self.watch()

    def watch(self) -> None:
        """Start to check. Call when there is work. Idempotent."""
        if self._timer is None:
            interval_s = self._max_silence_s / 4
            late_s = time.monotonic() + 2 * interval_s
            self._timer = asyncio.get_running_loop().call_later(interval_s, self._check, late_s)

    def stop(self) -> None:
        """Check no more until `watch` is called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, late_s: float) -> None:
        self._timer = None
        if not self._has_work():
            return
        if time.monotonic() > late_s:  # this process itself was stopped or busy: messages may be unread
            self.reset()
        if self.is_silent:
            self._on_hang()
        else:
            self.watch()
