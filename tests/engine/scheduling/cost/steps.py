"""Decode steps of requests that are all alike."""

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from tests.engine.requests import queued


def decode(num_rows: int, context: int) -> Batch:
    row = ScheduledRequest("", (1,), context - 1, (), SamplingParams(), (), (1,), samples=True)
    return Batch(Phase.DECODE, (row,) * num_rows)


def decoding(num_rows: int, context: int) -> list[Request]:
    return [queued("", [1] * context)] * num_rows
