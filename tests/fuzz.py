"""The number of fuzzed examples: few in every run of the tests, `TWOSTEP_FUZZ` times as many on demand."""

import os

from hypothesis import HealthCheck, settings


def fuzz(max_examples: int) -> settings:
    """Returns hypothesis's settings for tests over a running server or a file system, which examples share."""
    return settings(
        max_examples=num_examples(max_examples),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def num_examples(usual: int) -> int:
    """Returns how many examples there are to be, of tests that make their own. To be called when a module is imported:
    the tests of the server take the variable away."""
    return usual * int(os.environ.get("TWOSTEP_FUZZ", "1"))
