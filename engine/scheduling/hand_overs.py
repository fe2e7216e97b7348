"""Requests whose prompts are computed for another server, which goes on from their blocks: that they ended is told when
the KV store has these; torch-free.

Such a request holds nothing any more. Its blocks are cached, and written as those of any other.
"""

from collections.abc import Iterable, Sequence

import msgspec

from engine.core.messages import RequestUpdate
from engine.core.request import Request
from engine.scheduling.kv_allocator import KVAllocator


class HandOvers:
    """The requests to be handed over, and the last updates of those that wait for the KV store."""

    def __init__(self, kv: KVAllocator) -> None:
        self._kv = kv
        self._requests: dict[str, Request] = {}
        self._held: dict[str, RequestUpdate] = {}

    def add(self, request: Request) -> None:
        """Watches a request, if it is to be handed over."""
        if request.asked.until_stored:
            self._requests[request.request_id] = request

    def settle(self, updates: Sequence[RequestUpdate]) -> list[RequestUpdate]:
        """Returns what may be told now: of these updates those that need not wait, and of those that were held back
        those whose request's blocks are stored, with how many tokens that are."""
        told = [update for update in updates if not self._holds_back(update)]
        for request_id, update in list(self._held.items()):
            if (num_stored := self._kv.num_stored_tokens(self._requests[request_id])) is not None:
                told.append(msgspec.structs.replace(update, num_stored_tokens=num_stored))
                self.abort([request_id])
        return told

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets these requests; unknown ones are ignored."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._held.pop(request_id, None)

    def _holds_back(self, update: RequestUpdate) -> bool:
        if update.request_id not in self._requests or update.finish_reason is None:
            return False
        if update.error is not None:
            self.abort([update.request_id])
            return False
        self._held[update.request_id] = update
        return True
