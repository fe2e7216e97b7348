"""Requests of several tenants over the real engine, with a fake model, whose answers are checked."""

from collections import Counter
from typing import Any

from engine.core.messages import RequestUpdate
from engine.engine import Engine
from tests.engine.fakes import add, expected_tokens, fake_engine

PLACES = 4
LONG = 300


class Load:
    """Requests, by names whose first letters are their tenants."""

    def __init__(self, **fields: Any) -> None:
        self.engine: Engine = fake_engine(**{"num_blocks": 4096, "max_num_seqs": PLACES, **fields})
        self.outputs: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self._prompts: dict[str, list[int]] = {}

    def send(self, name: str, *, num_prompt: int = 3, **fields: Any) -> None:
        self._prompts[name] = [1 + len(self._prompts) % 7] * num_prompt
        self.outputs[name] = []
        add(self.engine, name, self._prompts[name], tenant=name[0], **fields)

    def step(self) -> list[RequestUpdate]:
        updates = self.engine.step().updates
        for update in updates:
            self.outputs[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                self.ended.append(update.request_id)
        return updates

    def steps_until_ended(self, name: str) -> int:
        for count in range(1, 5000):
            self.step()
            if name in self.ended:
                return count
        raise AssertionError(f"{name} did not end")

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        for name, output in self.outputs.items():
            assert output == expected_tokens(self._prompts[name], len(output)), name
        assert self.engine._scheduler.stats.pool.held == 0

    @property
    def running(self) -> Counter[str]:
        return Counter(name[0] for name in self.engine._scheduler.running_ids)

    @property
    def num_preemptions(self) -> int:
        return self.engine._scheduler.stats.num_preemptions


def flooded(**fields: Any) -> Load:
    """A load in which tenant a has taken all places for long."""
    load = Load(**fields)
    for number in range(2 * PLACES):
        load.send(f"a{number}", max_tokens=LONG)
    for _ in range(100):
        load.step()
    assert load.running == {"a": PLACES}
    return load
