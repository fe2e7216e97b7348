"""An agentic trace: sessions of turns, each of which sends the whole conversation so far, and a tool's result."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_TOKENS = 1 << 24  # of one session; token ids of sessions and agents are multiples of this apart


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    num_new: int
    """Tokens that the client adds behind the last answer."""
    num_output: int
    pause_s: float
    """Time between the answer before, or the session's start, and this request."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation of one agent."""

    number: int
    start_s: float
    shared: tuple[int, ...]
    """Tokens that all sessions of its agent begin with: tools and instructions."""
    turns: Sequence[Turn]
    has_key: bool
    """Whether its requests have a `prompt_cache_key`, as those of some agents do."""

    def prompt(self, turn: int) -> list[int]:
        """Returns the tokens of a turn's prompt, answers before it included."""
        first = (self.number + 1) * MAX_TOKENS
        return [*self.shared, *range(first, first + self._num_own(turn))]

    def answer(self, turn: int) -> list[int]:
        """Returns the tokens of a turn's answer: each is that before it plus one, which is all that a model has to know
        here."""
        first = (self.number + 1) * MAX_TOKENS + self._num_own(turn)
        return list(range(first, first + self.turns[turn].num_output))

    def _num_own(self, turn: int) -> int:
        return sum(each.num_new + each.num_output for each in self.turns[:turn]) + self.turns[turn].num_new


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The shape of a trace; numbers of tokens and turns are means of geometric distributions."""

    num_requests: int
    requests_per_s: float
    """Mean rate, of all sessions together, once there are as many of them as run at once."""
    num_agents: int = 200
    agent_tokens: int = 2048
    turns: float = 8.0
    first_tokens: float = 400.0
    turn_tokens: float = 300.0
    output_tokens: float = 40.0
    pause_s: float = 2.0
    max_model_len: int = 16384


def sessions(settings: TraceSettings, seed: int) -> Iterator[Session]:
    """Yields sessions in the order of their starts, with `num_requests` turns together. Agents are as unequally popular
    as words: the second has half as many sessions as the first."""
    draw = random.Random(seed)
    agents = [
        tuple(range(-each * MAX_TOKENS, settings.agent_tokens - each * MAX_TOKENS))
        for each in range(1, settings.num_agents + 1)
    ]
    weights = [1 / (rank + 1) for rank in range(settings.num_agents)]
    num_left, number, start_s = settings.num_requests, 0, 0.0
    while num_left > 0:
        start_s += draw.expovariate(settings.requests_per_s / settings.turns)
        shared = draw.choices(agents, weights)[0]
        turns = _turns(settings, draw)[:num_left]
        num_left -= len(turns)
        yield Session(number, start_s, shared, turns, number % 2 == 0)
        number += 1


def _turns(settings: TraceSettings, draw: random.Random) -> list[Turn]:
    turns: list[Turn] = []
    num_tokens = settings.agent_tokens
    for number in range(_geometric(settings.turns, draw)):
        num_new = _geometric(settings.turn_tokens if number else settings.first_tokens, draw)
        num_output = _geometric(settings.output_tokens, draw)
        num_left = settings.max_model_len - num_tokens - num_output
        if num_new > num_left and number:
            break
        num_new = max(min(num_new, num_left), 1)
        num_tokens += num_new + num_output
        pause_s = draw.expovariate(1 / settings.pause_s) if number else 0.0
        turns.append(Turn(num_new, num_output, pause_s))
    return turns


def _geometric(mean: float, draw: random.Random) -> int:
    """Returns a whole number of at least one, whose mean is about this."""
    return 1 + min(int(draw.expovariate(1 / mean)), int(8 * mean))
