"""The restart policy: how often, and how soon, an engine is started again."""

from engine.process.restart_policy import RestartPolicy
from tests.clock import Clock


def test_fruitless_restarts_come_slower_and_end() -> None:
    policy = RestartPolicy(10, Clock())
    delays = [policy.on_death(was_fruitful=False) for _ in range(12)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, None, None]


def test_a_fruitful_restart_begins_the_count_anew() -> None:
    policy = RestartPolicy(2, Clock())
    assert [policy.on_death(was_fruitful) for was_fruitful in [True, False, True, False, False]] == [
        *(0.0, 0.5, 0.0, 0.5),
        None,
    ]


def test_an_hour_has_ten_times_as_many_at_most() -> None:
    clock = Clock()
    policy = RestartPolicy(2, clock)
    for second in range(20):
        clock.now_s = float(second)
        assert policy.on_death(was_fruitful=True) == 0.0
    assert policy.on_death(was_fruitful=True) is None
    clock.now_s = 3600.5
    assert policy.on_death(was_fruitful=True) == 0.0
    assert policy.on_death(was_fruitful=True) is None


def test_a_limit_of_zero_allows_no_restart() -> None:
    assert RestartPolicy(0, Clock()).on_death(was_fruitful=True) is None
