"""What systemd is told of the service: that it is ready, that it stops, and that it is well (sd_notify(3))."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable

logger = logging.getLogger("twostep.server")

READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"


def notify(message: str) -> None:
    """Sends the message to the service manager, if one started this process. A failure is logged only."""
    if not (address := os.environ.get("NOTIFY_SOCKET")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)
    except OSError as error:
        logger.warning("the service manager was not told %s: %s", message, error)


def watchdog_s() -> float | None:
    """Returns how often, in seconds, the service manager wants to hear of this process; None if it does not."""
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    interval_us = os.environ.get("WATCHDOG_USEC", "")
    return int(interval_us) / 1e6 if interval_us.isdecimal() and int(interval_us) > 0 else None


async def keep_alive(is_well: Callable[[], bool]) -> None:
    """Tells the service manager twice in each of its intervals that the process is alive, while it `is_well`. Without
    that, or while the event loop stands still, it kills the process. Returns at once where nobody wants to hear."""
    if (interval_s := watchdog_s()) is None:
        return
    while True:
        if is_well():
            notify(ALIVE)
        await asyncio.sleep(interval_s / 2)
