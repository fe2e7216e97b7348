"""The progress of a live request, as reported to clients that ask for it."""

from dataclasses import dataclass

from engine.core.messages import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """Progress of one live request at the moment of asking."""

    client_request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    queue_s: float | None
    """Time from arrival until first scheduled; None before the first token."""
    ttft_s: float | None
    """Time to first token; None before the first token."""
    left_s: float | None
    """Time left until it has `max_tokens` at its rate so far. None before its second token."""
    state: RequestState | None
    """Progress in the engine; None if the engine did not report it in time."""
