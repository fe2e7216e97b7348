"""An engine with a draft model, whose steps and draft passes advance its clock."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.assembly import assemble
from engine.core.batch import Batch, StepOutput
from engine.core.config import EngineConfig
from engine.core.draft import Draft, Drafter
from engine.engine import Engine
from tests.engine.fakes import FakeRunner, fake_info

STEP_S, TOKEN_S, PASS_S = 0.010, 0.0002, 0.004
"""Seconds of a step, of each draft token in it, and of a pass of the draft model."""


class TimedRunner(FakeRunner):
    """A fake runner whose steps and passes advance its clock."""

    now_s = 0.0

    def prefill(self, batch: Batch) -> StepOutput:
        self.now_s += STEP_S
        return super().prefill(batch)

    def decode(self, batch: Batch) -> StepOutput:
        self.now_s += STEP_S + TOKEN_S * batch.num_drafts
        return super().decode(batch)

    def draft(self, batch: Batch) -> Batch:
        self.now_s += PASS_S * max(request.num_wanted for request in batch.requests)
        return super().draft(batch)


def drafting_engine(
    runner: TimedRunner,
    num_blocks: int = 64,
    new_drafter: Callable[[], Drafter] = lambda: SilentDrafter(),
    draft_kv_bytes: int = 0,
    num_state_slots: int | None = None,
    num_state_checkpoints: int = 0,
    has_head: bool = False,
    has_draft_weights: bool = True,
    **settings: Any,
) -> Engine:
    config = EngineConfig(model="fake", block_size=runner.block_size, **{"num_speculative_tokens": 3, **settings})
    info = fake_info(
        num_blocks,
        runner.block_size,
        has_draft_weights=has_draft_weights and num_state_slots is None,
        draft_kv_bytes=draft_kv_bytes,
        num_state_slots=num_state_slots,
        num_state_checkpoints=num_state_checkpoints,
        has_head=has_head,
        kv_groups=runner.groups,
    )
    return assemble(config, info, runner, clock=lambda: runner.now_s, new_drafter=new_drafter)


class SilentDrafter:
    """A drafter that finds nothing in the text."""

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        return Draft((), 0.0)
