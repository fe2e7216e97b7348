"""A prompt's scores between the two processes: in slices, encoded where they were made, so that those of a long prompt
hold up neither; torch-free."""

import asyncio
from collections.abc import Sequence

import msgspec

from engine.core.batch import TokenLogprobs

_SLICE = 64  # positions, of a hundred scores each at most: decoded in a millisecond or two


def pack_scores(scores: Sequence[TokenLogprobs]) -> list[bytes]:
    """Packed lists of some one after the other are the packed list of them all."""
    return [msgspec.msgpack.encode(scores[start : start + _SLICE]) for start in range(0, len(scores), _SLICE)]


async def unpack_scores(slices: Sequence[bytes]) -> list[TokenLogprobs]:
    """Others have their turn after each slice."""
    scores: list[TokenLogprobs] = []
    for each in slices:
        scores += msgspec.msgpack.decode(each, type=list[TokenLogprobs])
        await asyncio.sleep(0)
    return scores
