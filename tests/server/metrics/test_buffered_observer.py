"""Values are buffered, but none is lost or passed on twice, and not many are held."""

from server.metrics.buffered_observer import MAX_HELD, BufferedObserver


def test_every_value_is_passed_on_once_and_in_order() -> None:
    seen: list[int] = []
    batched = BufferedObserver(seen.append)
    for number in range(3 * MAX_HELD + 1):
        batched.add(number)
        assert number - len(seen) < MAX_HELD
    batched.flush()
    assert seen == list(range(3 * MAX_HELD + 1))
    batched.flush()
    assert len(seen) == 3 * MAX_HELD + 1


def test_values_are_passed_on_many_at_a_time() -> None:
    seen: list[int] = []
    batched = BufferedObserver(seen.append)
    for number in range(MAX_HELD - 1):
        batched.add(number)
    assert seen == []
    batched.add(0)
    assert len(seen) == MAX_HELD


def test_a_value_that_cannot_be_passed_on_takes_no_other_with_it() -> None:
    """Later values are passed on, and earlier ones not again."""
    seen: list[float] = []
    batched: BufferedObserver[int] = BufferedObserver(lambda value: seen.append(1 / value))
    batched.add(1)
    batched.add(0)
    try:
        batched.flush()
    except ZeroDivisionError:
        batched.add(2)
    batched.flush()
    assert seen == [1.0, 0.5]
