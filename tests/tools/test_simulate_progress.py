"""A long simulation says how far it is."""

from itertools import count

from tools.simulate.progress import PAUSE_S, telling
from tools.simulate.trace import TraceSettings, sessions

TRACE = TraceSettings(40, 40.0, num_agents=4, turns=4.0)


def test_it_says_what_part_has_begun_and_not_with_every_session() -> None:
    plain = list(sessions(TRACE, 1))
    lines: list[str] = []
    seconds = count(0, PAUSE_S / 2)
    assert list(telling(iter(plain), "random", 40, lines.append, lambda: next(seconds))) == plain
    assert len(lines) == len(plain) // 2
    begun = [sum(len(each.turns) for each in plain[:number]) for number in range(1, len(plain), 2)]
    assert lines == [
        f"random: {num / 40:.1%} of 40 requests after {(index + 1) * PAUSE_S:.0f} s" for index, num in enumerate(begun)
    ]


def test_a_short_one_says_nothing() -> None:
    assert len(list(telling(sessions(TRACE, 1), "random", 40, _no_line, lambda: 0.0))) > 1


def _no_line(line: str) -> None:
    raise AssertionError(line)
