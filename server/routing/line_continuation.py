"""Streams of lines of JSON, those of Ollama's API, that go on on another replica when theirs dies."""

import json
from typing import Any

from server.routing.pointed_continuation import PointedContinuation

_POINT = b'{"resume_point":'


class LineContinuation(PointedContinuation):
    """Its resume points are lines of their own."""

    separator = b"\n"

    def _seeded(self, seed: int) -> dict[str, Any]:
        return {"options": {**(self._body.get("options") or {}), "seed": seed}}

    def _point_of(self, event: bytes) -> dict[str, Any] | None:
        return dict(self._fields_of(event)["resume_point"]) if event.startswith(_POINT) else None

    def _is_beyond(self, event: bytes) -> bool:
        return False

    def _is_last(self, event: bytes) -> bool:
        fields = self._fields_of(event)
        return fields.get("done") is True or "error" in fields

    def _fields_of(self, event: bytes) -> dict[str, Any]:
        return dict(json.loads(event))

    def _continuing(self, event: bytes) -> bytes:
        fields = self._fields_of(event)
        if "created_at" in fields:
            fields["created_at"] = self._first["created_at"]
        return json.dumps(fields, separators=(",", ":")).encode()
