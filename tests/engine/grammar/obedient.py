"""Engines whose fake model follows grammars."""

import threading
import time
from collections.abc import Callable
from typing import Any

from engine.assembly import assemble
from engine.core.batch import ScheduledRequest
from engine.core.config import EngineConfig
from engine.core.crash_marker import Marker
from engine.core.draft import Drafter
from engine.core.messages import RequestUpdate
from engine.core.request import Constraint, FinishReason
from engine.engine import Engine
from engine.grammar.compiler import GrammarQueue
from engine.grammar.matcher import Matcher
from engine.scheduling.speculation.prompt_lookup import PromptLookup
from tests.engine.fakes import FakeRunner, add, fake_info
from tests.engine.grammar.matchers import TEXTS, compiler, tokens_in


class ObedientRunner(FakeRunner):
    """Samples the nearest allowed token above the fake model's own; none where none is allowed."""

    def _choose(self, request: ScheduledRequest) -> tuple[int, ...]:
        (token_id,) = super()._choose(request)
        if not request.allowed_tokens:
            return (token_id,)
        allowed = tokens_in(request.allowed_tokens[0])
        near = [(token_id + step) % len(TEXTS) for step in range(len(TEXTS))]
        return tuple(token for token in near if token in allowed)[:1]


def engine_with(
    compile: Callable[[str], Constraint],
    num_blocks: int = 64,
    marker: Marker | None = None,
    clock: Callable[[], float] = time.monotonic,
    new_drafter: Callable[[], Drafter] = PromptLookup,
    **settings: Any,
) -> Engine:
    config = EngineConfig(model="fake", block_size=4, **settings)
    info, runner, grammars = fake_info(num_blocks, 4), ObedientRunner(4), GrammarQueue(compile)
    return assemble(config, info, runner, marker=marker, clock=clock, grammars=grammars, new_drafter=new_drafter)


def add_with(engine: Engine, request_id: str, grammar: str | None, **fields: Any) -> None:
    add(engine, request_id, **{"grammar": grammar, "ignore_eos": False, "max_tokens": 20, **fields})


def the_end(updates: list[RequestUpdate]) -> FinishReason | None:
    return updates[-1].finish_reason


class Gate:
    """A compiler that waits until `is_open` is set."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_compiling = threading.Event()

    def __call__(self, grammar: str) -> Matcher:
        self.is_compiling.set()
        assert self.is_open.wait(20)
        return compiler()(grammar)
