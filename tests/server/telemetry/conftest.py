"""Fixtures of the tests of telemetry."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_variables_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the developer's OTEL_* variables."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
