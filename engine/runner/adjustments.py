"""What `adjust_row` and `forbid_tokens` change in a step's rows, as flat arrays for kernels that do it at once."""

from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.batch import ScheduledRequest
from engine.runner.logits_processors import adjusts_logits, banned_ids, forced_id_of
from engine.runner.token_counts import CountCache

__all__ = ["Adjustments"]

Arrays = dict[str, NDArray[np.generic]]
Bits = NDArray[np.uint8]  # [num_bytes]: bit i % 8 of byte i // 8 tells whether token i is allowed
_CAPACITY = 512  # requests whose tokens are counted from step to step


class Adjustments:
    """Makes the arrays of `engine.kernels.cuda.logits`. It keeps counts of requests' tokens from step to step."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._counts = CountCache(_CAPACITY)

    def of(self, requests: Sequence[ScheduledRequest], vocab_size: int) -> Arrays:
        """Returns the arrays by the names of the kernels' arguments; none if no request changes its row."""
        adjusted = [(row, each) for row, each in enumerate(requests) if each.allowed_tokens or adjusts_logits(each)]
        return {} if not adjusted else _masks_of(adjusted, len(requests), vocab_size) | self._entries_of(adjusted)

    def _entries_of(self, adjusted: Sequence[tuple[int, ScheduledRequest]]) -> Arrays:
        biases = [(row, self._biases_of(request)) for row, request in adjusted]
        penalties = [(row, *self._penalties_of(request)) for row, request in adjusted if _is_penalized(request)]
        return {
            "biased_rows": _rows_of(biases),
            "biased_ids": np.array([token_id for _, each in biases for token_id in each], np.int32),
            "biases": np.array([bias for _, each in biases for bias in each.values()], np.float32),
            "penalized_rows": _rows_of((row, ids) for row, ids, _, _ in penalties),
            "penalized_ids": _joined((ids for _, ids, _, _ in penalties), np.int32),
            "factors": _joined((np.full(len(ids), factor) for _, ids, factor, _ in penalties), np.float32),
            "amounts": _joined((amounts for *_, amounts in penalties), np.float32),
        }

    def _biases_of(self, request: ScheduledRequest) -> dict[int, float]:
        return {**request.params.logit_bias, **dict.fromkeys(banned_ids(request, self._eos_token_ids), -np.inf)}

    def _penalties_of(self, request: ScheduledRequest) -> tuple[NDArray[np.int32], float, NDArray[np.float32]]:
        """Returns the tokens, the factor, and the amounts in float32 as torch computes them."""
        params = request.params
        ids, counts = self._counts.counts_of(request)
        if params.repetition_penalty == 1.0:
            ids, counts = ids[counts > 0], counts[counts > 0]
        amounts = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        return ids.copy(), params.repetition_penalty, np.where(counts > 0, amounts, np.float32(0))


def _is_penalized(request: ScheduledRequest) -> bool:
    params = request.params
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def _masks_of(adjusted: Sequence[tuple[int, ScheduledRequest]], num_rows: int, vocab_size: int) -> Arrays:
    num_bytes = -(-vocab_size // 8)
    masks: list[Bits] = []
    mask_of_row, forced = np.full(num_rows, -1, np.int32), np.full(num_rows, -1, np.int32)
    for row, request in adjusted:
        grammar, listed = _grammar_bits(request, num_bytes), _listed_bits(request, num_bytes)
        if own := [bits for bits in (grammar, listed) if bits is not None]:
            mask_of_row[row] = len(masks)
            masks.append(np.bitwise_and.reduce(own))
        forced_id = forced_id_of(request)
        if forced_id is not None and (grammar is None or grammar[forced_id // 8] >> forced_id % 8 & 1):
            forced[row] = forced_id
    return {"masks": np.array(masks, np.uint8).reshape(-1, num_bytes), "mask_of_row": mask_of_row, "forced": forced}


def _grammar_bits(request: ScheduledRequest, num_bytes: int) -> Bits | None:
    """Returns the tokens that the request's grammar allows; it allows none that it has no bit for."""
    if not request.allowed_tokens:
        return None
    bits = np.zeros(num_bytes, np.uint8)
    known = np.frombuffer(request.allowed_tokens[0], np.uint8)[:num_bytes]
    bits[: len(known)] = known
    return bits


def _listed_bits(request: ScheduledRequest, num_bytes: int) -> Bits | None:
    """Returns the tokens that the request itself allows."""
    if request.params.allowed_token_ids is None:
        return None
    is_allowed = np.zeros(8 * num_bytes, np.bool_)
    is_allowed[[*request.params.allowed_token_ids]] = True
    return np.packbits(is_allowed, bitorder="little")


def _rows_of(lists: Iterable[tuple[int, Sized]]) -> NDArray[np.int32]:
    """Returns the row of each element of the lists, which come with their rows."""
    return _joined((np.full(len(each), row) for row, each in lists), np.int32)


def _joined(arrays: Iterable[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")
