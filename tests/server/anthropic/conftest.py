"""Servers whose models have room for the prompts of agents."""

from collections.abc import Generator

import pytest
from msgspec.structs import replace

from tests.server.conftest import AGENT_TEMPLATE
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.tools.tool_chats import MARKS

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
LONG = replace(INFO, max_model_len=2**20)


@pytest.fixture
def spacious(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    """A server whose model thinks and calls tools."""
    backend = FakeBackend(FakeEngine(info=LONG), chat_templates={"default": AGENT_TEMPLATE}, special_tokens=MARKS)
    with live_server(backend, max_waiting_tokens=2**20) as running:
        yield running


@pytest.fixture
def plain(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    """A server whose model does not think, and whose template knows no tools."""
    backend = FakeBackend(FakeEngine(info=LONG), chat_templates={"default": TURNS})
    with live_server(backend, max_waiting_tokens=2**20) as running:
        yield running
