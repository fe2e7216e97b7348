"""How far a request is, as the scheduler knows it; torch-free."""

from engine.fair_queue import FairQueue
from engine.messages import RequestState
from engine.request import Request, RequestStatus


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
