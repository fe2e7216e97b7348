"""Fixtures of the tests of telemetry."""

import os
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from tests.server.live_server import LiveServer, live_server

if TYPE_CHECKING:
    from tests.server.telemetry.told import Told


@pytest.fixture(autouse=True)
def no_variables_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the developer's OTEL_* variables."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def told() -> "Told":
    """Telemetry in memory. Its module needs the extra."""
    from tests.server.telemetry.told import in_memory

    return in_memory()


@pytest.fixture
def server(told: "Told", monkeypatch: pytest.MonkeyPatch) -> Generator[LiveServer, None, None]:
    """A server that tells `told`."""
    monkeypatch.setattr("server.app.open_telemetry", lambda _: told.telemetry)
    with live_server() as running:
        yield running
