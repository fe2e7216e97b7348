"""The completion that is not streamed: ranked where there are more candidates than wanted, answered."""

import math
from typing import Any

from starlette.responses import JSONResponse

from engine.outputs import RequestOutput
from server.completions.choice import ChoiceFormatter
from server.completions.plan import CompletionPlan
from server.generation.tally import Tally
from server.text import Tokenizer
from server.timings import complete_headers


def whole_response(
    plan: CompletionPlan, candidates: list[RequestOutput], tally: Tally, tokenizer: Tokenizer
) -> JSONResponse:
    timings = tally.timings()
    body = plan.head | {"choices": _choices(plan, candidates, tokenizer), "usage": tally.usage(), "timings": timings}
    return JSONResponse(body, headers=complete_headers(timings))


def _choices(plan: CompletionPlan, candidates: list[RequestOutput], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    request = plan.request
    choices: list[dict[str, Any]] = []
    for number, prompt in enumerate(plan.prompts):
        own = candidates[number * request.num_candidates :][: request.num_candidates]
        for output in best(own, request.n):
            formatter = ChoiceFormatter(len(choices), request, prompt, tokenizer)
            choices.append(formatter.format(output))
    return choices


def best(candidates: list[RequestOutput], count: int) -> list[RequestOutput]:
    """Those with the highest mean log-probability per token, best first; in their own order if all are wanted."""
    if len(candidates) == count:
        return candidates
    return sorted(candidates, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(output: RequestOutput) -> float:
    scores = [score.logprob for score in output.logprobs]
    return sum(scores) / len(scores) if scores else -math.inf
