"""Fixtures of the server's tests: live servers over an engine without a model."""

import os
from collections.abc import Generator

import pytest

from tests.server.live_server import LiveServer, live_server


@pytest.fixture(scope="session", autouse=True)
def no_settings_from_outside() -> Generator[None, None, None]:
    """The developer's environment must not reach the settings under test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith("TWOSTEP_"):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def shared_server(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server() as running:
        yield running


@pytest.fixture
def server(shared_server: LiveServer) -> Generator[LiveServer, None, None]:
    """One server for all tests, its engine as new for each. What a test leaves running in it fails the test."""
    shared_server.engine.reset()
    yield shared_server
    shared_server.wait_until_idle()
