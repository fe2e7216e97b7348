"""Which requests the registry sends to the engine process, and when, over deaths and trials."""

from engine.client.admission import AdmissionControl, AdmissionLimits
from engine.client.live_request import LiveRequest, TimedUpdate
from engine.client.request_registry import RequestRegistry
from engine.core.errors import EngineFailedError
from engine.core.generation_request import GenerationRequest
from engine.core.messages import AddRequest, FirstTokenInfo, MarkStalled, RequestUpdate
from engine.core.request import FinishReason
from engine.core.sampling_params import SamplingParams
from engine.process.poison_requests import Death
from tests.engine.async_engines import Words

FIRST = FirstTokenInfo(0.0, 0, 1)


class SpiedRegistry:
    """A registry, and what it sent to the engine since `sent` was called last."""

    def __init__(self, *names: str) -> None:
        self._sent: list[AddRequest | MarkStalled] = []
        self.registry = RequestRegistry(self._sent.append, lambda: None)
        self.live = {name: self._request(name) for name in names}
        self.registry.engine_is_up()
        for live in self.live.values():
            self.registry.add(live)

    def _request(self, name: str) -> LiveRequest:
        asked = GenerationRequest(prompt_token_ids=[1], params=SamplingParams(), arrival_s=0.0)
        return LiveRequest(asked, name, Words(), AdmissionControl(AdmissionLimits(), 9, 9).enter(1))

    def sent(self) -> dict[str, list[int]]:
        """Returns by name the tokens after which each request continues."""
        added = [message for message in self._sent if isinstance(message, AddRequest)]
        self._sent.clear()
        return {message.request_id: list(message.output_token_ids) for message in added}

    def marks(self) -> list[MarkStalled]:
        return [message for message in self._sent if isinstance(message, MarkStalled)]

    def token(self, name: str, finish_reason: FinishReason | None = None, time_s: float = 1.0) -> None:
        self.registry.put(
            name, TimedUpdate(RequestUpdate(name, (7,), first=FIRST, finish_reason=finish_reason), time_s)
        )
        self.registry.advance_trials()

    def dies(self, *computed: str) -> str | None:
        self.registry.engine_is_down()
        self.sent()
        return self.registry.engine_is_up(Death(computed))


def test_each_request_is_sent_once_and_after_a_death_again_with_the_tokens_so_far() -> None:
    spy = SpiedRegistry("a", "b")
    assert spy.sent() == {"a": [], "b": []}
    for name in "aab":
        spy.token(name)
    assert spy.dies() is None
    assert spy.sent() == {"a": [7, 7], "b": [7]}


def test_a_request_that_has_ended_is_not_sent_again() -> None:
    spy = SpiedRegistry("a", "b", "c")
    spy.token("a", FinishReason.LENGTH)
    assert spy.registry.remove(spy.live["b"]) and not spy.registry.remove(spy.live["b"])
    spy.dies()
    assert list(spy.sent()) == ["c"] and len(spy.registry) == 2


def test_a_request_that_comes_while_the_engine_is_down_waits_for_it() -> None:
    spy = SpiedRegistry("a")
    spy.registry.engine_is_down()
    spy.sent()
    other = SpiedRegistry("b").live["b"]
    other.is_known_to_engine = False
    spy.registry.add(other)
    assert spy.sent() == {}
    spy.registry.engine_is_up()
    assert list(spy.sent()) == ["a", "b"]


def test_a_request_with_two_tokens_is_no_suspect() -> None:
    spy = SpiedRegistry("a", "b")
    for name in "aabb":
        spy.token(name)
    spy.dies("a", "b")
    assert list(spy.sent()) == ["a", "b"] and spy.registry.num_suspects == 0


def test_suspects_are_sent_one_at_a_time_and_the_others_after_them() -> None:
    spy = SpiedRegistry("a", "b", "c")
    spy.dies("b", "c")
    assert list(spy.sent()) == ["b"]
    spy.token("b")
    assert spy.sent() == {}
    spy.token("b")
    assert list(spy.sent()) == ["c"]
    spy.token("c", FinishReason.STOP)
    assert list(spy.sent()) == ["a"]


def test_a_suspect_that_leaves_lets_the_next_one_run() -> None:
    spy = SpiedRegistry("a", "b")
    spy.dies("a", "b")
    spy.sent()
    spy.registry.remove(spy.live["a"])
    assert list(spy.sent()) == ["b"]


def test_a_suspect_that_left_before_its_trial_has_none() -> None:
    spy = SpiedRegistry("a", "b")
    spy.registry.engine_is_down()
    spy.registry.remove(spy.live["a"])
    spy.sent()
    spy.registry.engine_is_up(Death(["a"]))
    assert list(spy.sent()) == ["b"]


def test_tokens_of_an_earlier_process_end_no_trial() -> None:
    spy = SpiedRegistry("a", "b")
    spy.token("a")
    spy.dies("a")
    assert list(spy.sent()) == ["a"]
    spy.token("a")
    assert spy.sent() == {}


def test_the_guilty_one_fails_and_the_others_go_on() -> None:
    spy = SpiedRegistry("a", "b")
    assert spy.dies("a") is None
    assert spy.dies("a") == "a"
    assert spy.live["a"].is_complete and list(spy.sent()) == ["b"]


def test_company_that_has_two_tokens_still_counts_as_company() -> None:
    spy = SpiedRegistry("a", "b")
    for name in "bb":
        spy.token(name)
    assert [spy.dies("a", "b"), spy.dies("a", "b")] == [None, None]


def test_one_that_cannot_be_sent_fails_alone() -> None:
    spy = SpiedRegistry("a")

    def refuse(message: AddRequest) -> None:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")

    registry = RequestRegistry(refuse, lambda: None)
    registry.engine_is_up()
    live = spy.live["a"]
    live.is_known_to_engine = False
    registry.add(live)
    assert live.is_complete


def test_errors_reach_live_requests_only() -> None:
    spy = SpiedRegistry("a")
    spy.registry.put("nobody", EngineFailedError("x"))
    spy.registry.put("a", EngineFailedError("x"))
    assert spy.live["a"].is_complete


def test_the_engine_is_told_whose_reader_has_fallen_behind_and_its_successor_with_the_request() -> None:
    spy = SpiedRegistry("a", "b")
    for time_s in (1.0, 3.0):
        spy.token("a", time_s=time_s)
    assert spy.marks() == [MarkStalled("a", is_stalled=True)]
    spy.registry.engine_is_down()
    spy.registry.engine_is_up()
    added = [message for message in spy._sent if isinstance(message, AddRequest)]
    assert [message.is_stalled for message in added[-2:]] == [True, False]


def test_an_engine_that_has_ended_a_request_is_not_told_of_its_reader() -> None:
    spy = SpiedRegistry("a")
    spy.token("a")
    spy.token("a", FinishReason.LENGTH, time_s=3.0)
    assert spy.marks() == []
