"""Live requests as they are told: by the id of their HTTP request, a sequence each."""

from collections.abc import Iterator, Sequence
from typing import Any

from engine.core.request_snapshot import RequestSnapshot


def live_requests(views: Sequence[RequestSnapshot], now_s: float) -> Iterator[dict[str, Any]]:
    """One per id, in order of arrival. Clients choose ids, so one may stand for several HTTP requests."""
    groups: dict[str, list[RequestSnapshot]] = {}
    for view in views:
        groups.setdefault(view.group_id, []).append(view)
    return (
        {
            "id": group_id,
            "object": "request",
            "age_ms": _ms(now_s - min(view.arrival_s for view in group)),
            "sequences": [_sequence(view) for view in group],
        }
        for group_id, group in groups.items()
    )


def _sequence(view: RequestSnapshot) -> dict[str, Any]:
    state = view.state
    return {
        "phase": _phase(view),
        "queue_position": None if state is None or state.num_before is None else state.num_before + 1,
        "prompt_tokens": view.num_prompt_tokens,
        "cached_tokens": None if state is None else state.num_cached_tokens,
        "computed_tokens": None if state is None else state.num_computed_tokens,
        "generated_tokens": view.num_output_tokens,
        "kv_blocks": None if state is None else state.num_blocks,
        "ttft_ms": None if view.ttft_s is None else _ms(view.ttft_s),
        "predicted_end_ms": None if view.left_s is None else _ms(view.left_s),
    }


def _phase(view: RequestSnapshot) -> str | None:
    if view.ttft_s is not None:
        return "decode"
    if view.state is None:
        return None
    return "prefill" if view.state.was_scheduled else "queue"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
