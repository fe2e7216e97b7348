"""Packing of a prompt's log-probabilities for the way from the engine process to the server process; torch-free.

They are packed in slices, so that encoding and decoding those of a long prompt block neither process for long.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from engine.core.batch import TokenLogprobs

_SLICE = 64  # positions, of a hundred log-probabilities each at most: decoded in a millisecond or two


def pack_scores(scores: Sequence[TokenLogprobs]) -> list[bytes]:
    """Returns the encoded slices. Those of consecutive parts of a prompt, concatenated, unpack to the whole."""
    return [msgspec.msgpack.encode(scores[start : start + _SLICE]) for start in range(0, len(scores), _SLICE)]


async def unpack_scores(slices: Sequence[bytes]) -> list[TokenLogprobs]:
    """Returns the log-probabilities in the slices; other tasks of the event loop run after each slice."""
    scores: list[TokenLogprobs] = []
    for each in slices:
        scores += msgspec.msgpack.decode(each, type=list[TokenLogprobs])
        await asyncio.sleep(0)
    return scores
