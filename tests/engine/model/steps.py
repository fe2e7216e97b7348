"""Steps over a cache of twelve blocks: prompts, a chunk, then decoding beside a prompt."""

from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams

BLOCK_SIZE = 8
STEPS = (
    [(0, 21, (0, 1, 2)), (0, 1, (7,)), (0, 9, (4, 3))],
    [(21, 1, (0, 1, 2)), (1, 1, (7,)), (9, 30, (4, 3, 9, 5, 8))],
)
"""(start, number of tokens, blocks) of each request of each step."""


def request(start: int, num_tokens: int, blocks: tuple[int, ...]) -> ScheduledRequest:
    tokens = [(7 * position + blocks[0]) % 190 for position in range(start, start + num_tokens)]
    return ScheduledRequest("", tokens, start, blocks, SamplingParams(), [], [], True)
