"""What the scheduler reports of a request: its state when asked, and once its FirstTokenInfo; torch-free."""

from engine.core.messages import FirstTokenInfo, RequestState
from engine.core.request import Request, RequestStatus
from engine.scheduling.fair_queue import FairQueue


def state_of(request: Request, waiting: FairQueue) -> RequestState:
    """Returns how far the request is. `waiting` is the queue that holds it unless it runs."""
    return RequestState(
        request.request_id,
        was_scheduled=request.first_scheduled_s is not None,
        num_before=waiting.num_before(request) if request.status is RequestStatus.WAITING else None,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=len(request.block_table),
    )


def take_first_token_info(request: Request) -> FirstTokenInfo | None:
    """Returns what is sent once, with the request's first update; None from then on."""
    if request.is_announced:
        return None
    request.is_announced = True
    scored, request.prompt_logprobs = request.prompt_logprobs, []
    return FirstTokenInfo(
        first_scheduled_s=request.first_scheduled_s,
        num_cached_tokens=request.num_cached_tokens,
        num_prefill_chunks=request.num_prefill_chunks,
        prompt_logprobs=scored if request.params.prompt_logprobs is not None else None,
    )
