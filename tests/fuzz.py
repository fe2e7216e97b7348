"""How long to fuzz: a little in every run of the tests, `TWOSTEP_FUZZ` times as much on demand."""

import os

from hypothesis import HealthCheck, settings


def fuzz(max_examples: int) -> settings:
    """For tests over a running server or a file system: examples share what is around them, and time says nothing."""
    return settings(
        max_examples=max_examples * int(os.environ.get("TWOSTEP_FUZZ", "1")),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
