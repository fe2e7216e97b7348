"""Panics of Rust become errors; nothing else does."""

import pytest

from engine.host.rust_panics import is_panic, panics_as


class PanicException(BaseException):
    """As pyo3's, which nothing exports."""


def test_a_panic_becomes_an_error() -> None:
    with pytest.raises(ValueError, match="overflow") as caught, panics_as(ValueError):
        raise PanicException("overflow")
    assert is_panic(caught.value.__cause__ or caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, OSError])
def test_other_errors_stay(error: type[BaseException]) -> None:
    with pytest.raises(error), panics_as(ValueError):
        raise error
