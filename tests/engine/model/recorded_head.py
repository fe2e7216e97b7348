"""A head's forward pass that keeps the logits of all positions."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.runner.forward import HeadForward
from engine.runner.proposer import HeadProposer


class RecordedHead:
    """Runs a head, and appends to `logits` those of all positions of each pass."""

    def __init__(self, forward: HeadForward) -> None:
        self._forward, self.kept_of = forward, forward.kept_of
        self.logits: list[Tensor] = []

    def __call__(self, inputs: Any, hidden: Tensor, kept: Sequence[int]) -> Any:
        self.logits.append(self._forward(inputs, hidden, [*range(len(inputs.token_ids))]).logits.clone())
        return self._forward(inputs, hidden, kept)


def record(proposer: HeadProposer) -> list[Tensor]:
    """Returns a list that gets the logits of each pass of the proposer's head."""
    recorded = RecordedHead(proposer._forward)
    proposer._forward = recorded  # type: ignore[assignment]
    return recorded.logits
