"""Panics of libraries written in Rust, which reach Python as an exception that `except Exception` does not catch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["is_panic", "panics_as"]


def is_panic(error: BaseException) -> bool:
    """Whether the error is such a panic. Each library has a class of its own for them, which cannot be imported."""
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


@contextmanager
def panics_as(make_error: Callable[[str], Exception]) -> Iterator[None]:
    """Raises the error that is made of a panic's message in its place."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise make_error(str(error)) from error
