"""Whom the engine process is told of, and when, over deaths and trials."""

from engine.client.admission import AdmissionControl, AdmissionLimits
from engine.client.interface import GenerationRequest
from engine.client.live_request import LiveRequest, TimedUpdate
from engine.client.request_registry import RequestRegistry
from engine.core.errors import EngineFailedError
from engine.core.messages import AddRequest, FirstTokenInfo, RequestUpdate
from engine.core.request import FinishReason
from engine.core.sampling_params import SamplingParams
from engine.process.poison_requests import Death
from tests.engine.async_engines import Words

FIRST = FirstTokenInfo(0.0, 0, 1)


class Table:
    """A roster, and what it told the engine since someone asked last."""

    def __init__(self, *names: str) -> None:
        self._sent: list[AddRequest] = []
        self.roster = RequestRegistry(self._sent.append)
        self.live = {name: self._request(name) for name in names}
        self.roster.engine_is_up()
        for live in self.live.values():
            self.roster.add(live)

    def _request(self, name: str) -> LiveRequest:
        asked = GenerationRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams(), arrival_s=0.0)
        return LiveRequest(asked, name, Words(), AdmissionControl(AdmissionLimits(), 9, 9).enter(1))

    def told(self) -> dict[str, list[int]]:
        """Name to the tokens that it goes on after."""
        told = {message.request_id: list(message.output_token_ids) for message in self._sent}
        self._sent.clear()
        return told

    def token(self, name: str, finish_reason: FinishReason | None = None) -> None:
        self.roster.put(name, TimedUpdate(RequestUpdate(name, [7], first=FIRST, finish_reason=finish_reason), 1.0))
        self.roster.advance_trials()

    def dies(self, *computed: str) -> str | None:
        self.roster.engine_is_down()
        self.told()
        return self.roster.engine_is_up(Death(computed))


def test_everyone_is_told_once_and_after_a_death_again_with_the_tokens_so_far() -> None:
    table = Table("a", "b")
    assert table.told() == {"a": [], "b": []}
    for name in "aab":
        table.token(name)
    assert table.dies() is None
    assert table.told() == {"a": [7, 7], "b": [7]}


def test_who_has_ended_is_not_told_again() -> None:
    table = Table("a", "b", "c")
    table.token("a", FinishReason.LENGTH)
    assert table.roster.remove(table.live["b"]) and not table.roster.remove(table.live["b"])
    table.dies()
    assert list(table.told()) == ["c"] and len(table.roster) == 2


def test_who_comes_while_the_engine_is_down_waits_for_it() -> None:
    table = Table("a")
    table.roster.engine_is_down()
    table.told()
    other = Table("b").live["b"]
    other.is_known_to_engine = False
    table.roster.add(other)
    assert table.told() == {}
    table.roster.engine_is_up()
    assert list(table.told()) == ["a", "b"]


def test_who_got_two_tokens_is_no_suspect() -> None:
    table = Table("a", "b")
    for name in "aabb":
        table.token(name)
    table.dies("a", "b")
    assert list(table.told()) == ["a", "b"] and table.roster.num_suspects == 0


def test_suspects_are_told_one_at_a_time_and_the_others_after_them() -> None:
    table = Table("a", "b", "c")
    table.dies("b", "c")
    assert list(table.told()) == ["b"]
    table.token("b")
    assert table.told() == {}
    table.token("b")
    assert list(table.told()) == ["c"]
    table.token("c", FinishReason.STOP)
    assert list(table.told()) == ["a"]


def test_a_suspect_that_leaves_makes_room_for_the_next() -> None:
    table = Table("a", "b")
    table.dies("a", "b")
    table.told()
    table.roster.remove(table.live["a"])
    assert list(table.told()) == ["b"]


def test_a_suspect_that_left_before_its_trial_has_none() -> None:
    table = Table("a", "b")
    table.roster.engine_is_down()
    table.roster.remove(table.live["a"])
    table.told()
    table.roster.engine_is_up(Death(["a"]))
    assert list(table.told()) == ["b"]


def test_tokens_of_an_earlier_process_end_no_trial() -> None:
    table = Table("a", "b")
    table.token("a")
    table.dies("a")
    assert list(table.told()) == ["a"]
    table.token("a")
    assert table.told() == {}


def test_the_guilty_one_fails_and_the_others_go_on() -> None:
    table = Table("a", "b")
    assert table.dies("a") is None
    assert table.dies("a") == "a"
    assert table.live["a"].is_complete and list(table.told()) == ["b"]


def test_company_that_has_two_tokens_still_counts_as_company() -> None:
    table = Table("a", "b")
    for name in "bb":
        table.token(name)
    assert [table.dies("a", "b"), table.dies("a", "b")] == [None, None]


def test_one_that_cannot_be_sent_fails_alone() -> None:
    table = Table("a")

    def refuse(message: AddRequest) -> None:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")

    roster = RequestRegistry(refuse)
    roster.engine_is_up()
    live = table.live["a"]
    live.is_known_to_engine = False
    roster.add(live)
    assert live.is_complete


def test_errors_are_put_to_who_is_here_only() -> None:
    table = Table("a")
    table.roster.put("nobody", EngineFailedError("x"))
    table.roster.put("a", EngineFailedError("x"))
    assert table.live["a"].is_complete
