"""Admission control with a clock of its own."""

from typing import Any

import pytest

from engine.client.admission import AdmissionControl, AdmissionLimits, Place
from engine.core.errors import OverloadedError
from tests.clock import Clock


class ClockedAdmission(AdmissionControl):
    """Admission control with a clock of its own, and all places in the order they were taken."""

    def __init__(self, num_slots: int = 4, batch_tokens: int = 100, **limits: Any) -> None:
        self.clock = Clock()
        super().__init__(AdmissionLimits(**{"max_queue_s": 1e6, **limits}), num_slots, batch_tokens, self.clock)
        self.places: list[Place] = []

    def fill(self, num_requests: int, num_tokens: int = 1) -> None:
        self.places += [self.enter(num_tokens) for _ in range(num_requests)]

    def end(self, after_s: float = 0.0) -> None:
        """The oldest request ends."""
        self.clock.now_s += after_s
        self.places.pop(0).leave()

    def begin(self, num_requests: int, seconds_each: float) -> None:
        """The prompts of the oldest requests are computed, one after the other."""
        for place in self.places[:num_requests]:
            self.clock.now_s += seconds_each
            place.begin()

    def serve(self, times: int, seconds_each: float) -> None:
        """The oldest request ends and another comes in its place, `times` over."""
        for _ in range(times):
            self.end(seconds_each)
            self.fill(1)

    def refused(self, num_tokens: int = 1, max_queue_s: float | None = None) -> OverloadedError:
        with pytest.raises(OverloadedError) as refused:
            self.enter(num_tokens, max_queue_s)
        return refused.value

    def retry_after_s(self) -> float:
        return self.refused().retry_after_s
