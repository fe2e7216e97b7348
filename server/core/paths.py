"""Paths of URLs in the one form that routes, limits, keys and metrics know."""

from urllib.parse import unquote

from starlette.types import Scope


def plain_path(path: str) -> str:
    """Returns the path without repeated slashes and without one at its end: clients join a base URL and a path with
    none, one or two."""
    return "/" + "/".join(filter(None, path.split("/")))


def normalize_path(scope: Scope) -> None:
    """Gives the request its plain path. Slashes that are written as %2F are not touched."""
    raw = scope["raw_path"].decode("ascii")
    if "//" in raw or raw.endswith("/"):
        scope["raw_path"] = plain_path(raw).encode("ascii")
        scope["path"] = unquote(plain_path(raw))


def is_ollama(path: str) -> bool:
    """Tells whether the path belongs to Ollama's API, whose errors are a text."""
    return path.startswith("/api/")
