"""--chat-template: a file or a text, checked at start-up."""

import asyncio
import logging
from pathlib import Path

import pytest

from engine.core.errors import ConfigError, InvalidParameterError
from server.protocol.chat import ConversationParams
from server.settings.settings import Settings
from server.templates.render import ChatRenderer
from server.templates.setting import load_chat_renderer
from tests.server.byte_tokenizer import ByteTokenizer

PARAMS = ConversationParams.model_validate({"messages": [{"role": "user", "content": "Hi"}]})


def load(template: str | None, **checkpoint: str) -> ChatRenderer:
    return asyncio.run(load_chat_renderer(ByteTokenizer(checkpoint), Settings(chat_template=template)))


def test_a_text_replaces_the_models_own() -> None:
    assert load("{{ messages[0].content }}!", default="mine").render(PARAMS) == "Hi!"
    assert load(None, default="mine").render(PARAMS) == "mine"


def test_so_does_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("né{{ 1 }}", encoding="utf-8")
    assert load(str(tmp_path / "t.jinja"), default="mine", tool_use="tools").render(PARAMS) == "né1"


@pytest.mark.parametrize("template", ["no-such-file", "/", "{% if %}", "a\n{{", "\0"])
def test_what_cannot_be_used_is_refused_at_start(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^--chat-template: "):
        load(template)


def test_a_checkpoints_own_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        renderer = load(None, default="{% if %}")
    assert "cannot be used" in caplog.text
    with pytest.raises(InvalidParameterError):
        asyncio.run(renderer.encode(PARAMS))
