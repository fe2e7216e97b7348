"""The listening socket, the options that connections inherit from it, the certificate, and the process's limit of open
files."""

import logging
import resource
import socket
import ssl
import stat
from errno import EACCES, EADDRINUSE
from pathlib import Path

from engine.core.errors import ConfigError

logger = logging.getLogger("twostep.server")

BACKLOG = 2048
UNSENT_BYTES = 16 << 10
"""Bytes that the kernel takes ahead of a client's window: with more, it would take long to know who reads nothing."""
PROBE_AFTER_S, PROBE_EVERY_S = 30, 10
NUM_OTHER_FILES = 128
"""File descriptors kept for everything but clients' connections."""


def listen(host: str, port: int, stall_timeout_s: float) -> socket.socket:
    """Returns a listening socket. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host: cannot listen on {host}: {error.strerror}.") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _set_options(listener, stall_timeout_s)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno not in (EADDRINUSE, EACCES):
            raise ConfigError(f"--host: cannot listen on {host}: {error.strerror}.") from error
        raise ConfigError(
            f"--port: cannot listen on {host}, port {port}: {error.strerror}. Choose another port, or 0 for a free one."
        ) from error
    return listener


def listen_on_file(path: Path) -> socket.socket:
    """Returns a socket that listens on a file, for this user and group. One that an ended server left is replaced.
    Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _is_answered(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o660)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds: cannot listen on {path}: {error.strerror or error}.") from error
    return listener


def _is_answered(path: Path) -> bool:
    """Whether a server listens on this file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raises ConfigError for a certificate that cannot be served with, or a key without one."""
    if certificate is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile.")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        reason = error.reason or "it is no certificate, or not of this key"
        raise ConfigError(f"--ssl-certfile: {certificate} cannot be used: {reason}.") from error
    except OSError as error:
        names = " or ".join(str(path) for path in (certificate, key) if path)
        raise ConfigError(f"--ssl-certfile: {names} cannot be read: {error.strerror}.") from error


def _refuse_password() -> str:
    raise ConfigError("--ssl-keyfile: the key has a password: give one without.")


def _set_options(listener: socket.socket, stall_timeout_s: float) -> None:
    """Sets socket options, which connections inherit. The kernel closes a connection whose client acknowledges no bytes
    for the stall timeout, whatever state it is in: also one that was closed with a response unsent, and one whose
    machine vanished, which keep-alive probes find out."""
    # With Nagle's algorithm, a response's second write would wait 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout_s * 1000))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)


def raise_file_limit(max_connections: int) -> int:
    """Raises the process's limit of open files as far as it may, and returns how many connections fit into it, at most
    `max_connections`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= max_connections + NUM_OTHER_FILES:
        return max_connections
    fitting = max(1, hard - NUM_OTHER_FILES)
    logger.warning("the limit of %d open files leaves room for %d connections (--max-connections)", hard, fitting)
    return fitting
