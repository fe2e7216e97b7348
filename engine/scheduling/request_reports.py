"""What the scheduler reports of a request: its state when asked, and its updates; torch-free."""

from engine.core.batch import RequestStepOutput
from engine.core.messages import FirstTokenInfo, RequestState, RequestUpdate
from engine.core.request import FinishReason, Request, RequestStatus
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.output_tokens import AppendedTokens


def state_of(request: Request, waiting: FairQueue) -> RequestState:
    """Returns how far the request is. `waiting` is the queue that holds it unless it runs."""
    return RequestState(
        request.request_id,
        was_scheduled=request.first_scheduled_s is not None,
        num_before=waiting.num_before(request) if request.status is RequestStatus.WAITING else None,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=request.num_blocks,
    )


def update_of(request: Request, appended: AppendedTokens, result: RequestStepOutput) -> RequestUpdate:
    """Returns the update that a step made, given the tokens that were appended."""
    return RequestUpdate(
        request_id=request.request_id,
        token_ids=tuple(appended.token_ids),
        logprobs=result.logprobs[: len(appended.token_ids)],
        first=_take_first_token_info(request),
        finish_reason=appended.finish_reason,
        stop_token_id=appended.stop_token_id,
        num_preemptions=request.num_preemptions,
        embedding=result.embedding,
    )


def failure_of(request: Request, message: str, blames_request: bool) -> RequestUpdate:
    """Returns the update that ends a request with an error."""
    return RequestUpdate(
        request.request_id, finish_reason=FinishReason.ERROR, error=message, blames_request=blames_request
    )


def _take_first_token_info(request: Request) -> FirstTokenInfo | None:
    """Returns what is sent once, with the request's first update; None from then on."""
    if request.is_announced:
        return None
    request.is_announced = True
    scored, request.prompt_logprobs = request.prompt_logprobs, []
    return FirstTokenInfo(
        first_scheduled_s=request.first_scheduled_s,
        num_cached_tokens=request.num_cached_tokens,
        num_prefill_chunks=request.num_prefill_chunks,
        prompt_logprobs=scored if request.asked.params.prompt_logprobs is not None else None,
    )
