"""Chat templates: messages -> the prompt's text, sandboxed, as transformers' `apply_chat_template` renders it.

Uses jinja2 and no tokenizer. A template is code of the checkpoint's authors: it can read its variables and nothing
else. The length of its output and its time are limited, checked after each piece of output. A template that a client
sends needs harder limits: `engine.text.template_sandbox`.
"""

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.core.errors import InvalidParameterError

MAX_SECONDS = 5.0
MAX_CHARS = 2**24
_MAX_ERROR_CHARS = 500
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_END_OF_MESSAGE = "[[the end of the message to continue]]"  # no white space at its ends: trimming keeps it


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Variables of a template: the messages and options of one chat request."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = False
    """Whether the prompt ends with the text that begins the assistant's turn."""
    continue_final_message: bool = False
    """Whether the prompt ends with exactly the last message's text, its turn left open."""
    variables: dict[str, Any] = {}
    """Further variables of the template (enable_thinking, ...)."""


class ChatTemplate:
    """A compiled template. May be rendered by several threads at once."""

    def __init__(self, source: str) -> None:
        """Compiles `source`. Raises InvalidParameterError, naming `chat_template`, if it is no valid template."""
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except (TemplateSyntaxError, RecursionError, ValueError, SyntaxError) as error:
            raise InvalidParameterError(
                "chat_template", f"The chat template is not valid: {_error_text(error)}"
            ) from error

    def render(self, conversation: Conversation, named_tokens: Mapping[str, str]) -> str:
        """Returns the prompt. Raises InvalidParameterError, naming `messages`, with the template's own error
        message."""
        messages = [_with_reasoning_names(message) for message in conversation.messages]
        if conversation.continue_final_message:
            messages[-1], text = _marked(messages[-1])
        variables = {
            **named_tokens,
            **conversation.variables,
            "messages": messages,
            "tools": conversation.tools,
            "documents": conversation.documents,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            rendered = self._render_bounded(variables)
            _check_text(rendered)
        except Exception as error:  # whatever template code can raise
            raise _refusal(_error_text(error)) from error
        return _cut_at_mark(text, rendered) if conversation.continue_final_message else rendered

    def _render_bounded(self, variables: dict[str, Any]) -> str:
        deadline_s, num_chars, pieces = time.monotonic() + MAX_SECONDS, 0, []
        for piece in self._template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise TemplateError(f"it writes more than {MAX_CHARS} characters")
            if time.monotonic() > deadline_s:
                raise TemplateError(f"it takes more than {MAX_SECONDS:g} seconds")
        return "".join(pieces)


def _check_text(text: str) -> None:
    """Raises ValueError for lone surrogates and null characters, which not every tokenizer can handle."""
    text.encode()  # raises on lone surrogates
    if "\0" in text:
        raise ValueError("null characters are not allowed")


def _refusal(reason: str) -> InvalidParameterError:
    return InvalidParameterError("messages", f"The chat template refuses the messages: {reason}")


def _error_text(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return (text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "...").rstrip(".") + "."


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with its reasoning under each name that templates read: `reasoning_content` and
    `thinking`."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the message with its text's end marked, and the text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _END_OF_MESSAGE}, content
    if content and isinstance(content[-1].get("text"), str):
        last = content[-1]
        return {**message, "content": [*content[:-1], {**last, "text": last["text"] + _END_OF_MESSAGE}]}, last["text"]
    raise _refusal("the final message has no text to continue.")


def _cut_at_mark(text: str, rendered: str) -> str:
    """Returns the rendered prompt up to the mark that ends `text`.

    Templates may trim the start of a text; a message in which one changes more cannot be continued.
    """
    prompt, mark, _ = rendered.rpartition(_END_OF_MESSAGE)
    if not mark or not prompt.endswith(text.lstrip()):
        raise _refusal("it does not write the final message as it is, so it cannot be continued.")
    return prompt


class _GenerationTag(Extension):
    """The `{% generation %}` tag, which marks the model's own text for training. Here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 has it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict(...)` for templates: the type itself would be a way out of the sandbox."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)


class _Namespace(Namespace):
    """`namespace(...)` without attributes that begin with an underscore, which could shadow Python's own."""

    def __init__(*args: Any, **fields: Any) -> None:  # no `self`: it may be one of the fields
        self, *rest = args
        values = dict(*rest, **fields)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}: it begins with an underscore")


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns an environment with the settings, filters and functions that transformers gives to templates. Nothing is
    computed when a template is compiled: a constant costs what it does, and fails, only where it is rendered."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
        optimized=False,
        finalize=_at_run_time,
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )  # fmt: skip
    return environment


@pass_context
def _at_run_time(_: Context, value: Any) -> Any:
    """Returns the value. That it wants a context keeps jinja from writing outputs of constants when it compiles."""
    return value


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The `tojson` filter; jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
