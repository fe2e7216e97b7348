"""The number of fuzzed examples: few in every run of the tests, `TWOSTEP_FUZZ` times as many on demand."""

import os

from hypothesis import HealthCheck, settings


def fuzz(max_examples: int) -> settings:
    """Returns hypothesis's settings for tests over a running server or a file system, which examples share."""
    return settings(
        max_examples=max_examples * int(os.environ.get("TWOSTEP_FUZZ", "1")),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
