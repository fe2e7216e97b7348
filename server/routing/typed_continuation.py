"""Streams of typed events, those of Responses and Messages, that go on on another replica when theirs dies."""

import json
from typing import Any

from server.routing.pointed_continuation import PointedContinuation

TYPED_PATHS = frozenset({"/v1/responses", "/v1/messages"})
_POINT = b": {"
_BEYOND = (b":", b"event: ping\n")  # comments and pings belong to no token
_LAST = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop", "error"})
_SCORES = "message.output_text.logprobs"


class TypedContinuation(PointedContinuation):
    """Its resume points are comments."""

    @property
    def _tells_scores(self) -> bool:
        return _SCORES in (self._body.get("include") or ())

    def _seeded(self, seed: int) -> dict[str, Any]:
        return {"seed": seed}

    def _point_of(self, event: bytes) -> dict[str, Any] | None:
        return dict(json.loads(event.removeprefix(b": "))) if event.startswith(_POINT) else None

    def _is_beyond(self, event: bytes) -> bool:
        return event.startswith(_BEYOND)

    def _is_last(self, event: bytes) -> bool:
        return event.partition(b"\n")[0].removeprefix(b"event: ").decode() in _LAST

    def _fields_of(self, event: bytes) -> dict[str, Any]:
        return dict(json.loads(event.partition(b"\ndata: ")[2]))

    def _continuing(self, event: bytes) -> bytes:
        fields = self._fields_of(event)
        if "sequence_number" in fields:
            fields["sequence_number"] = self._num_passed
        if "response" in fields:
            fields["response"]["created_at"] = self._first["response"]["created_at"]
            if fields["response"].get("usage") is not None:
                fields["response"]["usage"]["input_tokens_details"] = self._cached
        if fields["type"] == "message_delta":  # a prompt's tokens are counted as they were when the stream began
            counts = self._first["message"]["usage"].items()
            fields["usage"] |= {name: count for name, count in counts if name != "output_tokens"}
        return event.partition(b"\n")[0] + b"\ndata: " + json.dumps(fields, separators=(",", ":")).encode()
