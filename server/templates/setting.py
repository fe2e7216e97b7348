"""The setting --chat-template: a file, or the template's text."""

import logging
from pathlib import Path

from engine.core.errors import ConfigError, InvalidParameterError
from server.core.tokenizer_protocol import Tokenizer
from server.settings.settings import Settings
from server.templates.render import ChatRenderer
from server.tools.model_format import DialectSettings

logger = logging.getLogger("twostep.server")


def load_chat_renderer(tokenizer: Tokenizer, settings: Settings) -> ChatRenderer:
    """Returns the renderer of the given template, or of the checkpoint's. Raises ConfigError for a given template that
    is invalid. An invalid one of the checkpoint is refused when a chat needs it: completions do without."""
    given = None if settings.chat_template is None else _read(settings.chat_template)
    renderer = ChatRenderer(
        tokenizer,
        given,
        settings.trust_request_chat_template,
        DialectSettings(settings.tool_call_parser, settings.reasoning_parser),
    )
    try:
        renderer.load()
    except InvalidParameterError as error:
        if given is not None:
            raise ConfigError(f"--chat-template: {error}") from error
        logger.warning("the model's chat template cannot be used: %s", error)
    return renderer


def _read(setting: str) -> str:
    """Returns the template's text. Only templates have braces or line breaks; file names have neither."""
    if "{" in setting or "\n" in setting:
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template: {setting!r} is neither a template nor a file to read: {error}.") from error
