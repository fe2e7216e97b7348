"""Packing of a prompt's log-probabilities, until they are written into an answer; torch-free.

Packed, one of a hundred takes 15 bytes; unpacked it is two numbers in two tuples, 70 bytes. They are packed in slices,
each of which is unpacked when it is read: those of a long prompt block neither process for long.
"""

from collections.abc import Iterator, Sequence

import msgspec

from engine.core.batch import TokenLogprobs

_SLICE = 16  # positions, of a hundred log-probabilities each at most: unpacked in half a millisecond


def pack_scores(scores: Sequence[TokenLogprobs]) -> list[bytes]:
    """Returns the encoded slices. Those of consecutive parts of a prompt, concatenated, unpack to the whole."""
    return [msgspec.msgpack.encode(scores[start : start + _SLICE]) for start in range(0, len(scores), _SLICE)]


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, the first of which has none: None. They can be read again and again, and
    are unpacked each time."""

    def __init__(self, slices: Sequence[bytes]) -> None:
        self._slices = slices

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        yield None
        for each in self._slices:
            yield from msgspec.msgpack.decode(each, type=list[TokenLogprobs])
