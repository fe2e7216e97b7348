"""The address of a server: its URL, parsed once, and the one IP address that every request of the run connects to."""

import asyncio
import socket
import ssl
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from loadtest.errors import Unreachable, UsageError

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Target:
    """A server to measure. `address` is numeric once resolved, so that no request waits for a name server."""

    label: str  # A, B, ...
    url: str  # base URL: no trailing slash, no /v1
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    address: str = ""

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.tls else 80) else f"{name}:{self.port}"


def parse_target(label: str, url: str) -> Target:
    """Parses http(s)://host[:port][/prefix][/v1][/]; raises UsageError for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url}: a URL looks like http://127.0.0.1:8000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"{url}: a URL has no user, query or fragment here (--api-key and --header exist)")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Target(
        label=label,
        url=f"{parts.scheme}://{parts.netloc}{path}",
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
        path=path,
        tls=ssl.create_default_context() if parts.scheme == "https" else None,
    )


async def resolve(target: Target) -> Target:
    """Returns the target with the first of its addresses that accepts a connection; raises Unreachable if none does."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"cannot find the host of {target.url}: {error.strerror}") from None
    reason = "no address"
    for address in dict.fromkeys(str(info[4][0]) for info in found):
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(address, target.port)
        except OSError as error:  # TimeoutError is one of them
            reason = connect_failure(error)
            continue
        writer.close()
        return replace(target, address=address)
    raise Unreachable(f"cannot connect to {target.url}: {reason}")


def connect_failure(error: OSError) -> str:
    """Returns why a connection could not be made, as a phrase."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    return error.strerror or str(error) or type(error).__name__
