"""Streams of choices that go on on another replica when theirs dies, without a token lost or said twice.

An answer is a function of the request. So the other replica is sent the same request, with the tokens so far, which it
computes as a prompt; what it then sends of them again is left out.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from server.routing.moves import ReplicaLostError

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""The APIs whose chunks say which tokens they have."""
LINE_PATHS = frozenset({"/api/chat", "/api/generate"})
"""The APIs that stream lines of JSON, unless they are asked not to."""
DONE = b"data: [DONE]"
UNAVAILABLE = "server_is_overloaded"  # the code of a server that stops, or gives its engine up

_CONTINUOUS = "continuous_usage_stats"


class ForeignReplicaError(Exception):
    """The replica that is to take over serves another model, or would compute other numbers."""


class Events:
    """Splits a stream of bytes into events, each without what ends it: for server-sent ones that is an empty line."""

    def __init__(self, separator: bytes = b"\n\n") -> None:
        self._separator = separator
        self._rest = b""

    def split(self, data: bytes) -> Iterator[bytes]:
        *events, self._rest = (self._rest + data).split(self._separator)
        yield from events


class StreamContinuation:
    """What a client got of one stream, over all replicas that were at it."""

    separator = b"\n\n"

    def __init__(self, body: Mapping[str, Any]) -> None:
        """`body` is the client's request, whose `stream` is true."""
        self._body = body
        self._head: dict[str, Any] = {}  # fields that all chunks of the stream share
        self._token_ids: dict[int, list[int]] = {}  # that the client got, by choice
        self._ended: set[int] = set()  # choices that have their finish reason
        self._num_seen: dict[int, int] = {}  # tokens of each choice that the replica at hand sent
        self._has_usage = False  # the last chunk, which has no choice
        self._has_moved = False
        self._prompt_details: Any = None  # of the usage, as the first replica told it
        self.is_done = False

    @property
    def has_begun(self) -> bool:
        """Whether the client got anything."""
        return bool(self._head)

    def next_body(self) -> dict[str, Any]:
        """Returns the body for the replica that is to begin the request, or to take it over from now on."""
        self._num_seen, self._has_moved = {}, self.has_begun
        body = {**self._body, "return_token_ids": True}
        if self._tells_usage_at_end:
            body["stream_options"] = {**self._body["stream_options"], _CONTINUOUS: True}
        if self.has_begun:
            body["seed"] = self._head["seed"]
        wants_scores = self._body.get("logprobs") or self._body.get("prompt_logprobs") is not None
        if self._token_ids and not wants_scores and self._body.get("logprobs") != 0:
            choices = range(max(self._token_ids) + 1)
            body["resume_token_ids"] = [self._unended(index) for index in choices]
        return body

    def take(self, event: bytes) -> bytes | None:
        """Returns what the client is to get of an event; None if it got that before. Raises ReplicaLostError for an
        event that says so, ForeignReplicaError for one that does not belong to the same stream."""
        if not event.startswith(b"data: ") or event == DONE:
            self.is_done |= event == DONE
            return event
        chunk = json.loads(event.removeprefix(b"data: "))
        if "choices" not in chunk:
            if (chunk.get("error") or {}).get("code") == UNAVAILABLE:
                raise ReplicaLostError
            return event
        self._check_head(chunk)
        self._take_usage(chunk)
        if not self._is_new_chunk(chunk):
            return None
        if not self._body.get("return_token_ids"):
            for each in (chunk, *chunk["choices"]):
                each.pop("token_ids", None)
                each.pop("prompt_token_ids", None)
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode()

    @property
    def _tells_usage_at_end(self) -> bool:
        """Whether the client gets the usage behind the last choice, and not in every chunk."""
        options = self._body.get("stream_options")
        return (
            isinstance(options, dict) and options.get("include_usage") is True and options.get(_CONTINUOUS) is not True
        )

    def _take_usage(self, chunk: dict[str, Any]) -> None:
        """Gives a chunk the usage of one answer: what was cached is what was when it began."""
        if (usage := chunk.get("usage")) is None:
            return
        if not self._has_moved:
            self._prompt_details = usage["prompt_tokens_details"]
        usage["prompt_tokens_details"] = self._prompt_details
        if chunk["choices"] and self._tells_usage_at_end:
            chunk["usage"] = None

    def _unended(self, index: int) -> list[int]:
        """Returns the tokens of a choice so far; none of one that has ended: it is computed again, and left out."""
        return [] if index in self._ended else self._token_ids.get(index, [])

    def _check_head(self, chunk: dict[str, Any]) -> None:
        """Gives a chunk the date of the first one. Raises ForeignReplicaError."""
        names = ("model", "system_fingerprint", "seed")
        if not self._head:
            self._head = {name: chunk.get(name) for name in (*names, "created")}
        if any(chunk.get(name) != self._head[name] for name in names):
            raise ForeignReplicaError
        chunk["created"] = self._head["created"]

    def _is_new_chunk(self, chunk: dict[str, Any]) -> bool:
        if chunk["choices"]:
            return all([self._is_new(choice) for choice in chunk["choices"]])
        has_usage, self._has_usage = self._has_usage, True
        return not has_usage

    def _is_new(self, choice: dict[str, Any]) -> bool:
        """Counts the tokens of a chunk's choice, and leaves out those that the client has. Returns whether there is
        anything left."""
        index, token_ids = choice["index"], choice.get("token_ids") or []
        if index in self._ended:
            return False
        got, seen = self._token_ids.setdefault(index, []), self._num_seen.get(index, 0)
        self._num_seen[index] = seen + len(token_ids)
        is_last = choice.get("finish_reason") is not None
        if token_ids:
            choice["token_ids"] = new = token_ids[max(len(got) - seen, 0) :]
            got += new
            if not new and not is_last:
                return False
        if is_last:
            self._ended.add(index)
        return True


def error_event(path: str, message: str) -> bytes:
    """Returns what ends a stream of an API that cannot go on, behind what was sent of it."""
    error: dict[str, Any]
    if path == "/v1/messages":
        error = {"type": "error", "error": {"type": "overloaded_error", "message": message}}
        return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
    if path == "/v1/responses":
        error = {"type": "error", "code": UNAVAILABLE, "message": message, "param": None}
        return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
    if path in LINE_PATHS:
        return json.dumps({"error": message}).encode() + b"\n"
    error = {"error": {"message": message, "type": "server_error", "param": None, "code": UNAVAILABLE}}
    return b"data: " + json.dumps(error).encode() + b"\n\n" + DONE + b"\n\n"
