"""The setting --chat-template: a file, or the template's text."""

import logging
from pathlib import Path

from engine.core.errors import ConfigError, InvalidParameterError
from server.core.tokenizer_protocol import Tokenizer
from server.settings.settings import Settings
from server.templates.render import ChatRenderer
from server.tools.model_format import DialectSettings

logger = logging.getLogger("twostep.server")


async def load_chat_renderer(tokenizer: Tokenizer, settings: Settings) -> ChatRenderer:
    """Returns the loaded renderer. Raises ConfigError for a given template that cannot be used. One of the checkpoint
    is refused when a chat needs it: completions do without."""
    renderer = chat_renderer(tokenizer, settings)
    try:
        await renderer.load()
    except InvalidParameterError as error:
        if settings.chat_template is not None:
            raise ConfigError(f"--chat-template: {error}") from error
        logger.warning("the model's chat template cannot be used: %s", error)
    return renderer


def chat_renderer(tokenizer: Tokenizer, settings: Settings) -> ChatRenderer:
    """Returns the renderer of the given template, or of the checkpoint's, before it is loaded. Raises ConfigError."""
    return ChatRenderer(
        tokenizer,
        read_template(settings),
        settings.trust_request_chat_template,
        DialectSettings(settings.tool_call_parser, settings.reasoning_parser),
    )


def read_template(settings: Settings) -> str | None:
    """Returns the given template's text, None without one. Only templates have braces or line breaks; file names have
    neither. Raises ConfigError."""
    setting = settings.chat_template
    if setting is None or "{" in setting or "\n" in setting:
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"--chat-template: {setting} is neither a template nor a file to read: {reason}.") from error
    except ValueError as error:
        raise ConfigError(f"--chat-template: {setting} is not UTF-8 text.") from error
