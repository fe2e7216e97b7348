"""The JSON of live requests: the engine's snapshots of sequences, grouped by the id of their HTTP request."""

from collections.abc import Iterator, Sequence
from typing import Any

from engine.core.request_snapshot import RequestSnapshot


def live_requests(snapshots: Sequence[RequestSnapshot], now_s: float) -> Iterator[dict[str, Any]]:
    """Returns one object per id, in order of arrival. Several HTTP requests may have one id: clients choose them."""
    groups: dict[str, list[RequestSnapshot]] = {}
    for snapshot in snapshots:
        groups.setdefault(snapshot.client_request_id, []).append(snapshot)
    return (
        {
            "id": client_request_id,
            "object": "request",
            "age_ms": _ms(now_s - min(snapshot.arrival_s for snapshot in group)),
            "sequences": [_sequence(snapshot) for snapshot in group],
        }
        for client_request_id, group in groups.items()
    )


def _sequence(snapshot: RequestSnapshot) -> dict[str, Any]:
    state = snapshot.state
    return {
        "phase": _phase(snapshot),
        "queue_position": None if state is None or state.num_before is None else state.num_before + 1,
        "prompt_tokens": snapshot.num_prompt_tokens,
        "cached_tokens": None if state is None else state.num_cached_tokens,
        "computed_tokens": None if state is None else state.num_computed_tokens,
        "generated_tokens": snapshot.num_output_tokens,
        "kv_blocks": None if state is None else state.num_blocks,
        "queue_ms": None if snapshot.queue_s is None else _ms(snapshot.queue_s),
        "ttft_ms": None if snapshot.ttft_s is None else _ms(snapshot.ttft_s),
        "predicted_end_ms": None if snapshot.left_s is None else _ms(snapshot.left_s),
    }


def _phase(snapshot: RequestSnapshot) -> str | None:
    if snapshot.ttft_s is not None:
        return "decode"
    if snapshot.state is None:
        return None
    return "prefill" if snapshot.state.was_scheduled else "queue"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
