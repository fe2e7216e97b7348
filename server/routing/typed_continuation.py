"""Streams of typed events, those of Responses and Messages, that go on on another replica when theirs dies.

Replicas send a resume point behind the events of each output but the last. Events are held until their point is there,
or the stream's end: so what the client got is all that comes of some tokens, and nothing of those behind them. What
the next replica sends of these tokens again is left out.
"""

import json
from collections.abc import Mapping
from typing import Any

from server.routing.continuation import UNAVAILABLE, ForeignReplicaError
from server.routing.moves import ReplicaLostError

TYPED_PATHS = frozenset({"/v1/responses", "/v1/messages"})
_POINT = b": {"
_BEYOND = (b":", b"event: ping\n")  # comments and pings belong to no token
_LAST = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop", "error"})
_SCORES = "message.output_text.logprobs"


class TypedContinuation:
    """What a client got of one stream, over all replicas that were at it."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """`body` is the client's request, whose `stream` is true."""
        self._body = body
        self._first: dict[str, Any] = {}  # the first event that the client got
        self._num_passed = 0  # events that it got
        self._head: dict[str, Any] = {}  # fields that all points of the stream share
        self._cached: dict[str, int] = {}  # of the prompt, when the stream began
        self._token_ids: list[int] = []  # of which it got all events
        self._num_seen = 0  # tokens that the replica at hand sent
        self._held: list[bytes] = []
        self._has_moved = False
        self.is_done = False

    @property
    def has_begun(self) -> bool:
        """Whether the client got anything."""
        return bool(self._first)

    def next_body(self) -> dict[str, Any]:
        """Returns the body for the replica that is to begin the request, or to take it over from now on."""
        self._num_seen, self._held, self._has_moved = 0, [], self.has_begun
        body = {**self._body, "resume_points": True}
        if self.has_begun:
            body["seed"] = self._head["seed"]
        if self._token_ids and _SCORES not in (self._body.get("include") or ()):
            body["resume_token_ids"] = [self._token_ids]
        return body

    def take(self, event: bytes) -> bytes | None:
        """Returns what the client is to get now that an event is there. Raises ReplicaLostError for one that says so,
        ForeignReplicaError for one that does not belong to the same stream."""
        if event.startswith(_POINT):
            return self._take_point(event)
        if event.startswith(_BEYOND):
            return event
        self._held.append(event)
        self.is_done = _type_of(event) in _LAST
        return self._passed_on() if self.is_done else None

    def _take_point(self, event: bytes) -> bytes | None:
        point = json.loads(event.removeprefix(b": "))
        if "error" in point:
            if point["error"] == UNAVAILABLE:
                raise ReplicaLostError
            return event if self._body.get("resume_points") else None
        token_ids, cached = point.pop("token_ids"), point.pop("cached")
        if not self._head:
            self._head, self._cached = point, cached
        is_new = self._num_seen >= len(self._token_ids)
        self._num_seen += len(token_ids)
        if point != self._head or (not is_new and self._num_seen > len(self._token_ids)):
            raise ForeignReplicaError
        if not is_new:
            self._held = []
            return None
        self._token_ids += token_ids
        if self._body.get("resume_points"):
            self._held.append(event)
        return self._passed_on()

    def _passed_on(self) -> bytes | None:
        """Returns the events that were held until now."""
        events, self._held = self._held, []
        return b"\n\n".join(map(self._passed, events)) or None

    def _passed(self, event: bytes) -> bytes:
        """Returns an event as the replica that began the stream would have sent it."""
        if event.startswith(_POINT):
            return event
        if not self.has_begun:
            self._first = json.loads(_data_of(event))
        elif self._has_moved:
            event = self._continuing(event)
        self._num_passed += 1
        return event

    def _continuing(self, event: bytes) -> bytes:
        """Returns an event of a later replica, with numbers and dates that fit those that the client got."""
        fields = json.loads(_data_of(event))
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


def _type_of(event: bytes) -> str:
    return event.partition(b"\n")[0].removeprefix(b"event: ").decode()


def _data_of(event: bytes) -> bytes:
    return event.partition(b"\ndata: ")[2]
