"""Whatever a model's code raises, told as why the model cannot be served."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.core.errors import UnsupportedModelError, reason_of
from engine.host.available_memory import is_memory_shortage

__all__ = ["refused_if_it_fails"]


@contextmanager
def refused_if_it_fails(problem: str) -> Iterator[None]:
    """Raises UnsupportedModelError, which begins with `problem`, for any error inside; shortages of memory and refusals
    stay what they are."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:  # models' code raises anything
        if is_memory_shortage(error):
            raise
        raise UnsupportedModelError(f"{problem}: {type(error).__name__}: {reason_of(error)}") from error
