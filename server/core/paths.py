"""Paths of URLs in the one form that routes, limits, keys and metrics know."""

from urllib.parse import unquote

from starlette.types import Scope


def plain_path(path: str) -> str:
    """Returns the path without repeated slashes and without one at its end: clients join a base URL and a path with
    none, one or two."""
    return "/" + "/".join(filter(None, path.split("/")))


def normalize_path(scope: Scope, root_path: str = "") -> None:
    """Gives the request its plain path, without `root_path` if a proxy left it there, and notes that for links. Slashes
    that are written as %2F are not touched."""
    scope["root_path"] = root_path
    raw = scope["raw_path"].decode("ascii")
    plain = plain_path(raw) if "//" in raw or raw.endswith("/") else raw
    while root_path and (plain == root_path or plain.startswith(f"{root_path}/")):
        plain = plain.removeprefix(root_path) or "/"  # again and again, as starlette would take it off once more
    if plain != raw:
        scope["raw_path"] = plain.encode("ascii")
        scope["path"] = unquote(plain)


def is_ollama(path: str) -> bool:
    """Tells whether the path belongs to Ollama's API, whose errors are a text."""
    return path.startswith("/api/")
