"""Streams with resume points that go on on another replica when theirs dies.

Replicas send a resume point behind the events of each output but the last. Events are held until their point is there,
or the stream's end: so what the client got is all that comes of some tokens, and nothing of those behind them. What
the next replica sends of these tokens again is left out.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from server.routing.continuation import UNAVAILABLE, ForeignReplicaError
from server.routing.moves import ReplicaLostError


class PointedContinuation(ABC):
    """What a client got of one stream, over all replicas that were at it."""

    separator = b"\n\n"
    """What ends each event."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """`body` is the client's request, which asks for a stream."""
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
            body |= self._seeded(self._head["seed"])
        if self._token_ids and not self._tells_scores:
            body["resume_token_ids"] = [self._token_ids]
        return body

    def take(self, event: bytes) -> bytes | None:
        """Returns what the client is to get now that an event is there. Raises ReplicaLostError for one that says so,
        ForeignReplicaError for one that does not belong to the same stream."""
        if (point := self._point_of(event)) is not None:
            return self._take_point(event, point)
        if self._is_beyond(event):
            return event
        self._held.append(event)
        self.is_done = self._is_last(event)
        return self._passed_on() if self.is_done else None

    @property
    def _tells_scores(self) -> bool:
        """Whether the client gets log-probabilities, which there would be none of for tokens that were given."""
        return False

    @abstractmethod
    def _seeded(self, seed: int) -> dict[str, Any]:
        """Returns the fields of the body that ask for this seed."""

    @abstractmethod
    def _point_of(self, event: bytes) -> dict[str, Any] | None:
        """Returns the resume point that the event is; None if it is none."""

    @abstractmethod
    def _is_beyond(self, event: bytes) -> bool:
        """Whether the event belongs to no token."""

    @abstractmethod
    def _is_last(self, event: bytes) -> bool:
        """Whether the event ends the stream."""

    @abstractmethod
    def _fields_of(self, event: bytes) -> dict[str, Any]: ...

    @abstractmethod
    def _continuing(self, event: bytes) -> bytes:
        """Returns an event of a later replica, with numbers and dates that fit those that the client got."""

    def _take_point(self, event: bytes, point: dict[str, Any]) -> bytes | None:
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
        return self.separator.join(map(self._passed, events)) or None

    def _passed(self, event: bytes) -> bytes:
        """Returns an event as the replica that began the stream would have sent it."""
        if self._point_of(event) is not None:
            return event
        if not self.has_begun:
            self._first = self._fields_of(event)
        elif self._has_moved:
            event = self._continuing(event)
        self._num_passed += 1
        return event
