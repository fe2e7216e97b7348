"""What the scheduler tells of a request: how far it is, and once how it began; torch-free."""

from engine.core.messages import FirstTokenInfo, RequestState
from engine.core.request import Request, RequestStatus
from engine.scheduling.fair_queue import FairQueue


def state_of(request: Request, waiting: FairQueue) -> RequestState:
    """`waiting` is the queue that it is in, unless it runs."""
    return RequestState(
        request.request_id,
        was_scheduled=request.first_scheduled_s is not None,
        num_before=waiting.num_before(request) if request.status is RequestStatus.WAITING else None,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=len(request.block_table),
    )


def announce(request: Request) -> FirstTokenInfo | None:
    """What is told once, with the first news; None from then on."""
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
