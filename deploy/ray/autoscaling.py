"""How many replicas there should be, by what waits and what runs on them."""

import math
from typing import Any, Protocol


class Reports(Protocol):
    """The part of Ray's AutoscalingContext that counts here."""

    @property
    def aggregated_metrics(self) -> dict[str, dict[Any, float]]: ...

    @property
    def current_num_replicas(self) -> int: ...


class ByWaitingTokens:
    """As many replicas as bring waiting prompt tokens, and sequences, below what one replica should have. Ray keeps the
    result within its bounds, and waits before it follows."""

    def __init__(self, waiting_tokens: int, sequences: int) -> None:
        self._limits = {"waiting_tokens": waiting_tokens, "sequences": sequences}

    def __call__(self, context: Reports) -> tuple[int, dict[str, Any]]:
        if not (reports := context.aggregated_metrics):
            return context.current_num_replicas, {}
        totals = {name: sum(reports.get(name, {}).values()) for name in self._limits}
        return max(1, *(math.ceil(totals[name] / limit) for name, limit in self._limits.items())), {}
