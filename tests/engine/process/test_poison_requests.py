"""Poison requests: exactly those that kill the engine are refused, however they are mixed with others."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.process.poison_requests import Death, PoisonRequests

MAX_NUM_SEQS = 4


@dataclass
class Culprit:
    """A request that kills the engine which computes this token of it, in decode and perhaps in prefill."""

    position: int
    kills_prefill: bool


@dataclass
class World:
    """An engine that runs requests as the real one does: prefill gives a first token, then all decode together."""

    culprits: dict[str, Culprit]
    num_tokens: dict[str, int]
    """Tokens so far of every request that is left to run."""
    batched_prefill: bool
    suspects: PoisonRequests = field(default_factory=PoisonRequests)
    refused: list[str] = field(default_factory=list)
    num_deaths: int = 0
    kills: list[int] = field(default_factory=list)
    """For each process that is killed from outside, the number of its steps before."""
    runs_out_of_memory: bool = False
    """Whether culprits do not crash the engine, but have it killed by the kernel for the memory that they need."""
    max_tokens: int = 40

    def live(self) -> None:
        """One engine process, from its start to its death or the end of all work."""
        started: dict[str, int] = {}  # tokens from this process
        num_steps = 0
        while self.num_tokens:
            step = self.next_step(started)
            num_steps += 1
            is_killed = bool(self.kills) and self.kills[0] < num_steps
            if is_killed or any(self.is_fatal(name, name in started) for name in step):
                if is_killed:
                    self.kills.pop(0)
                return self.die(step, started, is_killed)
            self.advance(step, started)

    def next_step(self, started: dict[str, int]) -> list[str]:
        trial = self.suspects.on_trial
        fresh = [name for name in self.num_tokens if name not in started and trial in (None, name)]
        num_free = MAX_NUM_SEQS - len(started)
        prefill = fresh[: max(num_free, 0) if self.batched_prefill else min(num_free, 1)]
        return prefill or list(started)

    def is_fatal(self, name: str, decodes: bool) -> bool:
        culprit = self.culprits.get(name)
        return culprit is not None and self.num_tokens[name] >= culprit.position and (decodes or culprit.kills_prefill)

    def advance(self, step: list[str], started: dict[str, int]) -> None:
        for name in step:
            started[name] = started.get(name, 0) + 1
            self.num_tokens[name] += 1
            if self.num_tokens[name] >= self.max_tokens:
                del self.num_tokens[name], started[name]
                self.suspects.clear(name)
            elif started[name] >= 2:
                self.suspects.clear(name)

    def die(self, step: list[str], started: dict[str, int], is_killed: bool) -> None:
        self.num_deaths += 1
        unproven = [name for name in step if started.get(name, 0) < 2]
        guilty = self.suspects.on_death(Death(step, may_be_from_outside=is_killed or self.runs_out_of_memory), unproven)
        if guilty is not None:
            self.refused.append(guilty)
            del self.num_tokens[guilty]

    def run(self, max_lives: int) -> None:
        for _ in range(max_lives):
            if self.num_tokens:
                self.live()
        assert not self.num_tokens, "requests are left"


names = [f"r{i}" for i in range(8)]
culprits = st.dictionaries(st.sampled_from(names), st.builds(Culprit, st.integers(0, 3), st.booleans()), max_size=3)


@settings(max_examples=300)
@given(culprits, st.booleans(), st.booleans())
def test_exactly_those_that_kill_are_refused_soon(
    culprits: dict[str, Culprit], batched_prefill: bool, runs_out_of_memory: bool
) -> None:
    world = World(culprits, dict.fromkeys(names, 0), batched_prefill, runs_out_of_memory=runs_out_of_memory)
    world.run(max_lives=10 * len(culprits) + 1)
    assert sorted(world.refused) == sorted(culprits)


@settings(max_examples=300)
@given(st.lists(st.integers(2, 30), max_size=20), st.booleans())
def test_victims_of_kills_from_outside_are_not_refused(kills: list[int], batched_prefill: bool) -> None:
    """Kills from outside make no request guilty as long as each process gets as far as two steps."""
    world = World({}, dict.fromkeys(names, 0), batched_prefill, kills=kills)
    world.run(max_lives=len(kills) + 1)
    assert world.refused == []


@settings(max_examples=300)
@given(st.lists(st.one_of(st.just(1), st.integers(4, 30)), max_size=20), st.booleans())
def test_nor_are_they_when_trials_are_hit_less_than_three_times_in_a_row(kills: list[int], batched: bool) -> None:
    rare = [kill if index % 3 else 30 for index, kill in enumerate(kills)]
    world = World({}, dict.fromkeys(names, 0), batched, kills=rare)
    world.run(max_lives=len(rare) + 1)
    assert world.refused == []


CRASH, KILL = Death(["a"]), Death(["a"], may_be_from_outside=True)


def deaths_until_guilty(*deaths: Death) -> int | None:
    suspects = PoisonRequests()
    for number, death in enumerate(deaths, start=1):
        if suspects.on_death(death, ["a"]) is not None:
            assert suspects.on_trial is None
            return number
        assert suspects.on_trial == "a"
    return None


def test_a_request_that_crashes_the_engine_alone_is_refused_at_the_second_death() -> None:
    assert deaths_until_guilty(CRASH, CRASH) == 2


def test_kills_that_may_be_from_outside_count_in_trials_only_and_take_three() -> None:
    assert deaths_until_guilty(KILL, KILL, KILL) is None
    assert deaths_until_guilty(KILL, KILL, KILL, KILL) == 4
    assert deaths_until_guilty(CRASH, KILL, KILL) == 3


def test_a_death_in_company_proves_nothing() -> None:
    suspects = PoisonRequests()
    assert [suspects.on_death(Death(["a", "proven"]), ["a"]) for _ in range(5)] == [None] * 5


def test_two_tokens_forgive_an_earlier_death() -> None:
    suspects = PoisonRequests()
    suspects.on_death(CRASH, ["a"])
    suspects.clear("a")
    assert suspects.on_death(CRASH, ["a"]) is None


def test_the_newest_suspects_are_tried_first() -> None:
    suspects, order = PoisonRequests(), []
    suspects.on_death(Death(["a", "b"]), ["a", "b"])
    suspects.on_death(Death(["b", "c"]), ["b", "c"])
    assert len(suspects) == 3
    while (on_trial := suspects.on_trial) is not None:
        order.append(on_trial)
        suspects.clear(on_trial)
    assert order == ["b", "c", "a"]


def test_a_death_between_steps_is_held_against_no_request() -> None:
    suspects = PoisonRequests()
    suspects.on_death(Death(), [])
    assert suspects.on_trial is None
