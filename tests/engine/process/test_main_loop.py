"""The engine process's main loop, run in this process over a scripted link."""

from collections.abc import Callable
from functools import partial

import pytest

from engine.core.config import EngineConfig
from engine.core.crash_marker import Marker, NullMarker
from engine.core.errors import ConfigError, UnsupportedModelError
from engine.core.messages import (
    AbortRequests,
    AddRequest,
    DropPrefixes,
    EngineFailure,
    EngineReady,
    FromEngine,
    Heartbeat,
    Inspect,
    Inspection,
    RequestRefused,
    RequestsScheduled,
    Shutdown,
    Start,
    StepUpdate,
    ToEngine,
)
from engine.core.sampling_params import SamplingParams
from engine.process import __main__ as process
from engine.process.__main__ import Load
from engine.process.__main__ import run as run_process
from engine.process.transport import ServerGoneError
from tests.engine import fake_engine_process as fake
from tests.engine.requests import adding

START = Start(EngineConfig(model="fake"), 20)


class ScriptedLink:
    """A link that returns one list of messages at each receive; then the server is gone."""

    def __init__(self, *script: list[ToEngine]) -> None:
        self.sent: list[FromEngine] = []
        self.waits: list[float] = []
        self._script = iter(script)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        self.waits.append(timeout_s)
        messages = next(self._script, None)
        if messages is None:
            raise ServerGoneError
        return messages

    def has_arrived(self) -> bool:
        return False

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def tokens(self) -> list[tuple[str, list[int]]]:
        steps = [message for message in self.sent if isinstance(message, StepUpdate)]
        return [(update.request_id, list(update.token_ids)) for step in steps for update in step.updates]


class ClosingEngine(fake.FakeEngine):
    """A fake engine that knows whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def run(link: ScriptedLink, load: Load) -> int:
    return run_process(link, load, NullMarker(), -1)


def add(name: str, command: int = fake.PLAIN, max_tokens: int = 2) -> AddRequest:
    return adding(name, [10, command], SamplingParams(max_tokens=max_tokens))


def loader_of(engine: fake.FakeEngine) -> Load:
    return lambda config, marker, kv_memory_fd: engine


def raising(error: Exception) -> Load:
    def load(config: EngineConfig, marker: Marker, kv_memory_fd: int) -> fake.FakeEngine:
        raise error

    return load


def test_one_message_per_step_carries_all_requests() -> None:
    link = ScriptedLink([START], [add("a"), add("b")], [], [Shutdown()])
    assert run(link, fake.load) == 0
    ready, scheduled, *steps = link.sent
    assert isinstance(ready, EngineReady) and scheduled == RequestsScheduled(["a", "b"]) and len(steps) == 2
    assert link.tokens() == [("a", [10]), ("b", [10]), ("a", [11]), ("b", [11])]


def test_all_waiting_messages_are_handled_before_the_next_step() -> None:
    link = ScriptedLink([START], [add("a", max_tokens=9)], [AbortRequests(["a"]), add("b")], [Shutdown()])
    run(link, fake.load)
    assert link.tokens() == [("a", [10]), ("b", [10])]


def test_the_loop_waits_only_when_idle_and_then_sends_heartbeats() -> None:
    link = ScriptedLink([START], [], [add("a")], [], [], [Shutdown()])
    run(link, fake.load)
    assert [type(message).__name__ for message in link.sent[1:]] == [
        *("Heartbeat", "RequestsScheduled", "StepUpdate", "StepUpdate", "Heartbeat")
    ]
    assert [wait > 0 for wait in link.waits] == [True, True, True, False, True, True]
    assert isinstance(link.sent[1], Heartbeat) and link.sent[1].time_s > 0


def test_an_engine_rests_where_there_was_nothing_for_a_second() -> None:
    rests = []

    class Resting(fake.FakeEngine):
        def rest(self, is_wanted: Callable[[], bool]) -> None:
            assert not is_wanted()
            rests.append(len(link.waits))

    def load(config: EngineConfig, marker: Marker, _: int) -> Resting:
        return Resting(config, marker)

    link = ScriptedLink([START], [], [add("a")], [], [Inspect([])], [], [Shutdown()])
    run(link, load)
    assert rests == [2, 6]


def test_a_query_is_answered_before_the_next_step() -> None:
    link = ScriptedLink([START], [add("a", max_tokens=9)], [Inspect(["a"])], [Shutdown()])
    run(link, fake.load)
    assert [type(message).__name__ for message in link.sent[2:]] == ["StepUpdate", "Inspection", "StepUpdate"]
    assert isinstance(answer := link.sent[3], Inspection) and answer.states[0].num_computed_tokens == 1


def test_what_is_cached_is_told_as_it_is_after_the_drops_before() -> None:
    link = ScriptedLink([START], [DropPrefixes("alice", "x"), Inspect([], ["alice", "bob"])], [Shutdown()])
    run(link, fake.load)
    assert isinstance(answer := link.sent[1], Inspection)
    assert {tenant: [each.key for each in found] for tenant, found in answer.cached.items()} == {
        "alice": ["x"],
        "bob": [],
    }


def test_an_abort_is_reported_in_the_next_step_even_if_nothing_is_left_to_do() -> None:
    link = ScriptedLink([START], [add("a", fake.WAIT)], [AbortRequests(["a"])], [Shutdown()])
    run(link, fake.load)
    last = link.sent[-1]
    assert isinstance(last, StepUpdate) and last.stats.pool.held == 0


def test_a_refused_request_is_reported_by_name() -> None:
    link = ScriptedLink([START], [add("a", fake.REFUSE), add("b")], [Shutdown()])
    assert run(link, fake.load) == 0
    assert RequestRefused("a", "The fake refuses this prompt.", "prompt") in link.sent
    assert link.tokens() == [("b", [10])]


@pytest.mark.parametrize("error", [ConfigError("no"), UnsupportedModelError("no")])
def test_a_failure_to_start_is_reported_by_kind(error: Exception) -> None:
    link = ScriptedLink([START])
    assert run(link, raising(error)) == 2
    assert link.sent == [EngineFailure(type(error).__name__, "no")]


def test_an_unforeseen_failure_to_start_carries_its_traceback() -> None:
    link = ScriptedLink([START])
    assert run(link, raising(ZeroDivisionError("x"))) == 1
    (failure,) = link.sent
    assert isinstance(failure, EngineFailure) and failure.kind == "ZeroDivisionError"
    assert "Traceback" in failure.detail and "Traceback" not in failure.message


def test_a_step_that_raises_is_the_last() -> None:
    engine = ClosingEngine(START.config)
    link = ScriptedLink([START], [add("a", fake.RAISE)], [add("b")])
    assert run(link, loader_of(engine)) == 1
    assert isinstance(link.sent[-1], EngineFailure) and link.tokens() == []
    assert engine.is_closed


def test_without_a_server_the_loop_ends() -> None:
    engine = ClosingEngine(START.config)
    with pytest.raises(ServerGoneError):
        run(ScriptedLink([START], [add("a")]), loader_of(engine))
    assert engine.is_closed


def test_an_engine_is_ready_when_what_loading_left_behind_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(process, "trim_after_startup", partial(done.append, "trim_after_startup"))

    def load(config: EngineConfig, marker: Marker, kv_memory_fd: int) -> fake.FakeEngine:
        done.append("load")
        return fake.load(config, marker, kv_memory_fd)

    monkeypatch.setattr(ScriptedLink, "send", lambda _, message: done.append(type(message).__name__))
    run(ScriptedLink([START], [Shutdown()]), load)
    assert done == ["load", "trim_after_startup", "EngineReady"]


def test_nothing_is_loaded_before_start() -> None:
    link = ScriptedLink([add("a")], [Shutdown()])
    assert run(link, raising(AssertionError())) == 0
    assert link.sent == []
