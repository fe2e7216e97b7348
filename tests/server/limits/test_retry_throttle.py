"""The delays of requests that come soon after a refusal."""

import pytest

from server.limits.retry_throttle import MAX_WAIT_S, MIN_GAP_S, NUM_PER_S, RetryThrottle


def test_a_later_request_does_not_wait() -> None:
    retry_throttle = RetryThrottle()
    assert [retry_throttle.wait_s(100.0, 100.0 + MIN_GAP_S + after_s) for after_s in (1e-9, 1.0)] == [0.0, 0.0]
    assert retry_throttle.wait_s(-float("inf"), 0.0) == 0.0


def test_an_immediate_retry_waits_for_the_rest_of_the_gap() -> None:
    assert RetryThrottle().wait_s(100.0, 100.01) == pytest.approx(MIN_GAP_S - 0.01)


def test_immediate_retries_take_turns() -> None:
    retry_throttle = RetryThrottle()
    waits_s = [retry_throttle.wait_s(100.0, 100.0) for _ in range(9)]
    assert waits_s == pytest.approx([MIN_GAP_S + number / NUM_PER_S for number in range(9)])


def test_no_retry_waits_longer_than_the_maximum() -> None:
    retry_throttle = RetryThrottle()
    assert max(retry_throttle.wait_s(100.0, 100.0) for _ in range(2 * NUM_PER_S)) == MAX_WAIT_S


def test_after_a_quiet_time_the_turns_begin_anew() -> None:
    retry_throttle = RetryThrottle()
    for _ in range(100):
        retry_throttle.wait_s(100.0, 100.0)
    assert retry_throttle.wait_s(200.0, 200.0) == pytest.approx(MIN_GAP_S)


def test_a_later_request_takes_no_turn() -> None:
    retry_throttle = RetryThrottle()
    for _ in range(100):
        retry_throttle.wait_s(100.0, 101.0)
    assert retry_throttle.wait_s(101.0, 101.0) == pytest.approx(MIN_GAP_S)
