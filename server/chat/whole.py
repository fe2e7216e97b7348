"""The chat completion that is not streamed."""

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from engine.core.outputs import RequestOutput
from server.chat.choice import ChatChoice
from server.chat.plan import ChatPlan
from server.chat.usage import ChatUsageCounter
from server.core.timings import complete_headers
from server.core.tokenizer_protocol import Tokenizer
from server.generation.logprobs import prompt_logprobs
from server.generation.outputs import in_turns
from server.generation.whole_answer import answer_of


async def whole_response(
    plan: ChatPlan,
    choices: Sequence[ChatChoice],
    outputs: Sequence[Sequence[RequestOutput]],
    counter: ChatUsageCounter,
    tokenizer: Tokenizer,
    stall_timeout_s: float,
) -> Response:
    """Returns the response; `outputs` are those of each choice."""
    body: dict[str, Any] = dict(plan.head)
    body["choices"] = await in_turns(choice.whole(own) for choice, own in zip(choices, outputs, strict=True))
    timings = counter.timings()  # after the choices, which count reasoning for the usage
    first = next((own[0] for own in outputs if own[0].prompt_logprobs is not None), outputs[0][0])
    body |= prompt_fields(plan, first, tokenizer) | {"usage": counter.usage(), "timings": timings}
    return await answer_of(body, complete_headers(timings), stall_timeout_s)


def prompt_fields(plan: ChatPlan, first: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the fields about the prompt, once per response. `first` is the first output of any choice."""
    fields: dict[str, Any] = {}
    if plan.request.return_token_ids:
        fields["prompt_token_ids"] = plan.prompts[0].token_ids
    if plan.request.prompt_logprobs is not None:
        scores = first.prompt_logprobs or ()
        fields["prompt_logprobs"] = prompt_logprobs(scores, plan.request.prompt_logprobs, tokenizer)
    return fields
