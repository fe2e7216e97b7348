"""How often each token occurs in a request, kept from step to step: counting a long history anew takes milliseconds."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.batch import ScheduledRequest

__all__ = ["CountCache", "TokenCounts"]


class TokenCounts:
    """Counts of the tokens of a request's output, and which ones its prompt has."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        """The prompt is not copied, and never changes."""
        self._prompt = prompt_token_ids
        ids = np.unique(np.fromiter(prompt_token_ids, np.int32, len(prompt_token_ids)))
        self._num_prompt = len(ids)
        self._num_ids = len(ids)
        self._ids: NDArray[np.int32] = ids
        self._counts = np.zeros(len(ids), np.float32)
        self._places: dict[int, int] = {token_id: place for place, token_id in enumerate(ids.tolist())}
        self._output: list[int] = []  # what is counted
        self._source: Sequence[int] = ()  # the list from which the newest of it came

    def is_of(self, request: ScheduledRequest) -> bool:
        """Whether these are counts of a request with this prompt."""
        return self._prompt is request.prompt_token_ids or self._prompt == request.prompt_token_ids

    def of(self, output_token_ids: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Returns the tokens that prompt and output have, each once, and how often the output has them.

        The arrays are views that the next call changes. Whatever output was counted before, the result is the same; it
        takes little if this one goes on from there. A list from which tokens were counted may have grown since.
        """
        if self._source is not output_token_ids:
            self._forget_from(_num_common(self._output, output_token_ids))
            self._source = output_token_ids
        for token_id in output_token_ids[len(self._output) :]:
            place = self._place_of(token_id)
            self._counts[place] += 1
            self._output.append(token_id)
        return self._ids[: self._num_ids], self._counts[: self._num_ids]

    def _forget_from(self, end: int) -> None:
        for token_id in self._output[end:]:
            self._counts[self._places[token_id]] -= 1
        del self._output[end:]
        # Tokens that came with these came last.
        while self._num_ids > self._num_prompt and self._counts[self._num_ids - 1] == 0:
            self._num_ids -= 1
            del self._places[int(self._ids[self._num_ids])]

    def _place_of(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, self._num_ids)
        if place == self._num_ids:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(64 + place, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(64 + place, np.float32)])
            self._ids[place] = token_id
            self._num_ids += 1
        return place


class CountCache:
    """Counts of the requests that were last asked for."""

    def __init__(self, capacity: int) -> None:
        """It keeps those of `capacity` requests."""
        self._capacity = capacity
        self._counts: OrderedDict[str, TokenCounts] = OrderedDict()  # by request id, the last asked for at the end

    def counts_of(self, request: ScheduledRequest) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Returns what `TokenCounts.of` does for the request's output."""
        counts = self._counts.pop(request.request_id, None)
        if counts is None or not counts.is_of(request):
            counts = TokenCounts(request.prompt_token_ids)
        self._counts[request.request_id] = counts
        if len(self._counts) > self._capacity:
            self._counts.popitem(last=False)
        return counts.of(request.output_token_ids)


def _num_common(some: Sequence[int], others: Sequence[int]) -> int:
    """Returns how many tokens both begin with."""
    if some == list(others[: len(some)]):
        return len(some)
    differing = (index for index, (a, b) in enumerate(zip(some, others, strict=False)) if a != b)
    return next(differing, len(others))
