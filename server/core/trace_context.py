"""The trace that a request belongs to, as its client names it in headers: W3C's Trace Context."""

import re

from starlette.datastructures import Headers

_TRACEPARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_MAX_LENGTH = 512


def trace_id_of(headers: Headers) -> str | None:
    """Returns the id in `traceparent`; None without one that is valid."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return None if match is None else match[1]


def trace_headers(headers: Headers) -> dict[str, str]:
    """Returns the headers that make what another server does for the request a part of its trace; empty if there is
    none."""
    if trace_id_of(headers) is None:
        return {}
    found = {"traceparent": headers["traceparent"], "tracestate": ",".join(headers.getlist("tracestate"))}
    return {name: text for name, text in found.items() if 0 < len(text) <= _MAX_LENGTH and text.isascii()}
