"""The completion that is not streamed: its candidates are ranked if there are more than `n`, and formatted."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from engine.core.outputs import RequestOutput
from server.completions.choice import ChoiceFormatter
from server.completions.plan import CompletionPlan
from server.core.timings import complete_headers
from server.core.tokenizer_protocol import Tokenizer
from server.generation.outputs import in_turns
from server.generation.usage import UsageCounter
from server.generation.whole_answer import answer_of


async def whole_response(
    plan: CompletionPlan,
    candidates: list[RequestOutput],
    counter: UsageCounter,
    tokenizer: Tokenizer,
    stall_timeout_s: float,
) -> Response:
    timings = counter.timings()
    choices = await in_turns(_choices(plan, candidates, tokenizer))
    body = plan.head | {"choices": choices, "usage": counter.usage(), "timings": timings}
    return await answer_of(body, complete_headers(timings), stall_timeout_s)


def _choices(plan: CompletionPlan, candidates: list[RequestOutput], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    request, index = plan.request, itertools.count()
    for number, prompt in enumerate(plan.prompts):
        own = candidates[number * request.num_candidates :][: request.num_candidates]
        for output in best(own, request.n):
            yield ChoiceFormatter(next(index), request, prompt, tokenizer).format(output)


def best(candidates: list[RequestOutput], count: int) -> list[RequestOutput]:
    """Returns the `count` candidates with the highest mean logprob per token, best first; all of them as they are."""
    if len(candidates) == count:
        return candidates
    return sorted(candidates, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(output: RequestOutput) -> float:
    scores = [score.logprob for score in output.logprobs]
    return sum(scores) / len(scores) if scores else -math.inf
