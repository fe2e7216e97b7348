"""Whatever a model's code raises, told as why the model cannot be served."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from engine.core.errors import UnsupportedModelError, reason_of
from engine.host.available_memory import is_memory_shortage

__all__ = ["KNOWN_TRANSFORMERS", "advice_about_transformers", "refused_if_it_fails"]

KNOWN_TRANSFORMERS = "5.23"
"""The minor version whose models' attributes and calls are known here."""


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
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise UnsupportedModelError(f"{problem}: {reason}{advice_about_transformers(error)}") from error


def advice_about_transformers(error: Exception) -> str:
    """Returns words in parentheses, behind a space, if another version of transformers than the known one may be why a
    model's class is not what it was; else nothing."""
    installed = version("transformers")
    is_known = installed.split(".")[:2] == KNOWN_TRANSFORMERS.split(".")
    if is_known or not isinstance(error, AttributeError | TypeError | ImportError | KeyError):
        return ""
    return f" (transformers {installed} may have changed it: pip install 'transformers=={KNOWN_TRANSFORMERS}.*')"
