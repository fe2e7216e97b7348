"""The load of every replica, in one unit, and which replica has the least."""

import heapq
from collections.abc import Collection
from dataclasses import dataclass

STREAM_TOKENS = 256
"""What a running stream counts, in prompt tokens that wait: its decode steps come before prefill steps."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica reports of itself: `waiting_tokens` and `requests_running` of its `/load`."""

    waiting_tokens: int = 0
    """Prompt tokens of requests without a first token."""
    num_running: int = 0

    @property
    def num_tokens(self) -> int:
        """The load in prompt tokens: a request that is sent now waits for about that many to be computed."""
        return self.waiting_tokens + STREAM_TOKENS * self.num_running


class ReplicaLoads:
    """The newest report of each replica, plus what was sent to it since. Replicas of equal load take turns."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._turn_of: dict[str, int] = {}  # in which replicas of equal load are chosen, the lowest first
        self._num_turns = 0
        self._heap: list[tuple[int, int, str]] = []  # those that differ from `_tokens` and `_turn_of` are out of date

    def __contains__(self, replica: str) -> bool:
        return replica in self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, replica: str) -> tuple[int, int]:
        """Returns the replica's load in tokens and its turn: the lowest pair is chosen."""
        return self._tokens[replica], self._turn_of[replica]

    def add(self, replica: str) -> None:
        """Adds an idle replica, whose turn comes last among idle ones."""
        self._set(replica, 0, self._next_turn())

    def remove(self, replica: str) -> None:
        del self._tokens[replica], self._turn_of[replica]

    def report(self, replica: str, load: ReplicaLoad) -> None:
        """Takes the place of what was known of the replica."""
        self._set(replica, load.num_tokens, self._turn_of[replica])

    def send(self, replica: str, num_tokens: int) -> None:
        """Counts a request that was sent, of which `num_tokens` are to be computed, until the next report."""
        self._set(replica, self._tokens[replica] + num_tokens + STREAM_TOKENS, self._next_turn())

    def least(self, excluded: Collection[str] = ()) -> str | None:
        """Returns the replica with the least load; None if there is none beside `excluded`."""
        skipped = []
        found = None
        while self._heap and found is None:
            tokens, turn, replica = self._heap[0]
            if self._tokens.get(replica) != tokens or self._turn_of[replica] != turn:
                heapq.heappop(self._heap)
            elif replica in excluded:
                skipped.append(heapq.heappop(self._heap))
            else:
                found = replica
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def _next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def _set(self, replica: str, tokens: int, turn: int) -> None:
        self._tokens[replica], self._turn_of[replica] = tokens, turn
        heapq.heappush(self._heap, (tokens, turn, replica))
        if len(self._heap) > 64 + 4 * len(self._tokens):
            self._heap = [(*self[each], each) for each in self._tokens]
            heapq.heapify(self._heap)
