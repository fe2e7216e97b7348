"""What is told of a live request to who asks how it is."""

from dataclasses import dataclass

from engine.core.messages import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """One live request, as it stands."""

    group_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    """None before the first token."""
    left_s: float | None
    """Until it has `max_tokens` if they go on to come as they did. None before its second token."""
    state: RequestState | None
    """As the engine has it; None if it did not tell in time."""
