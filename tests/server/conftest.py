"""Fixtures of the server's tests: live servers over an engine without a model."""

import os
from collections.abc import Generator

import pytest

from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.tools.tool_chats import HERMES, MARKS, THINKING


@pytest.fixture(scope="session", autouse=True)
def no_settings_from_outside() -> Generator[None, None, None]:
    """Removes the developer's TWOSTEP_* variables, which must not reach the settings under test."""
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
    """One server for all tests, with its engine reset for each. Requests that a test leaves running fail the test."""
    shared_server.engine.reset()
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture(scope="session")
def impatient(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    """A server with short timeouts and few connections."""
    with live_server(header_timeout=0.2, body_timeout=0.2, stall_timeout=0.3, max_connections=8) as running:
        yield running


AGENT_TEMPLATE = """\
{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}[assistant]{% if deep %}<think>{% endif %}"""


@pytest.fixture(scope="session")
def shared_agent(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(chat_templates={"default": AGENT_TEMPLATE}, special_tokens=MARKS)) as running:
        yield running


@pytest.fixture
def agent(shared_agent: LiveServer) -> Generator[LiveServer, None, None]:
    """A server whose model thinks and calls tools."""
    shared_agent.engine.reset()
    yield shared_agent
    shared_agent.wait_until_idle()


@pytest.fixture(scope="session")
def shared_hermes(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(chat_templates={"default": HERMES}, special_tokens=MARKS)) as running:
        yield running


@pytest.fixture
def hermes(shared_hermes: LiveServer) -> Generator[LiveServer, None, None]:
    """A server whose model calls tools. Its marks are special tokens."""
    shared_hermes.engine.reset()
    yield shared_hermes
    shared_hermes.wait_until_idle()


@pytest.fixture(scope="session")
def shared_thinker(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(chat_templates={"default": THINKING}, special_tokens=MARKS)) as running:
        yield running


@pytest.fixture
def thinker(shared_thinker: LiveServer) -> Generator[LiveServer, None, None]:
    """A server whose model thinks. Its marks are special tokens."""
    shared_thinker.engine.reset()
    yield shared_thinker
    shared_thinker.wait_until_idle()
