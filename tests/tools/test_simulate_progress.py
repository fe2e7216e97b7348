"""A long simulation says how far it is."""

from itertools import count

import pytest

from tools.simulate.__main__ import main
from tools.simulate.progress import PAUSE_S, Progress


def test_it_says_what_part_has_ended_and_not_with_every_request() -> None:
    lines: list[str] = []
    seconds = count(0, PAUSE_S / 2)
    progress = Progress("random", 8, lines.append, lambda: next(seconds))
    for num_ended in range(1, 9):
        progress(num_ended)
    assert lines == [
        f"random: {2 * number / 8:.1%} of 8 requests after {number * PAUSE_S:.0f} s" for number in range(1, 5)
    ]


def test_what_is_said_comes_to_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tools.simulate.progress.PAUSE_S", 0.0)
    main(["--replicas", "2", "--requests", "20", "--policy", "random"])
    said = [line for line in capsys.readouterr().err.splitlines() if " of 20 requests after " in line]
    assert len(said) == 20 and "100.0% of 20 requests" in said[-1]


def test_a_short_one_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--replicas", "2", "--requests", "20", "--policy", "random"])
    assert " of 20 requests after " not in capsys.readouterr().err
