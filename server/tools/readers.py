"""The formats in which models write calls, each as a reader of a whole message.

A call that is malformed, or of a function that was not offered, is content. So is text around calls; spaces and marks
behind a call are discarded. Once its arguments have begun a call is a call, however they go on.
"""

from collections.abc import Callable

from server.tools.call import read_arguments, read_call
from server.tools.incremental_text import IncrementalText, NotACall, Reading
from server.tools.message_parts import Content, Reasoning

Reader = Callable[[IncrementalText], Reading[None]]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_NAME_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-."


def read_content(text: IncrementalText) -> Reading[None]:
    """Reads a message without calls: all of it is content."""
    text.emit(Content)
    while (yield from text.arrived()):
        text.emit_all(Content)


def read_hermes(text: IncrementalText) -> Reading[None]:
    """Reads `<tool_call>{"name": ..., "arguments": ...}</tool_call>` (Hermes 2 Pro, Qwen 2.5 and 3)."""
    while (yield from text.read_until(HERMES_OPEN)):
        if (yield from _attempt(text, read_call)):
            yield from text.skip_spaces()
            if (yield from text.accept(HERMES_CLOSE)):
                text.discard()
                yield from text.skip_spaces()


def read_llama(text: IncrementalText) -> Reading[None]:
    """Reads `{"name": ..., "parameters": ...}`, alone or behind `<|python_tag|>`; several with `;` between (Llama
    3)."""
    is_due = True
    while True:
        if is_due and (yield from _attempt(text, read_call)):
            yield from text.skip_spaces()
            is_due = yield from text.accept(";")
        elif (yield from text.read_until(LLAMA_TAG)):
            is_due = True
        else:
            return


def read_mistral(text: IncrementalText) -> Reading[None]:
    """Reads `[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    while (yield from text.read_until(MISTRAL_CALLS)):
        if (yield from _attempt(text, _mistral_calls)):
            yield from text.skip_spaces()


def read_json(text: IncrementalText) -> Reading[None]:
    """Reads a message that begins with `{"name": ..., "arguments": ...}`: one call, several in lines, or a list."""
    if (yield from _attempt(text, _json_calls)):
        yield from text.skip_spaces()
    yield from read_content(text)


def after_thinking(reader: Reader, starts_inside: bool) -> Reader:
    """Returns a reader of `<think>...</think>` before the message that `reader` reads. With `starts_inside` the prompt
    has opened the thinking."""

    def read(text: IncrementalText) -> Reading[None]:
        if starts_inside or (yield from _attempt(text, _opens_thinking)):
            text.discard()
            yield from text.read_until(THINK_CLOSE, Reasoning)
            text.discard()
            yield from text.skip_spaces()
        yield from reader(text)

    return read


def _attempt(text: IncrementalText, reader: Reader) -> Reading[bool]:
    """Runs `reader`, and returns whether it found what it reads. If not, what it has read is content."""
    try:
        yield from reader(text)
    except NotACall:
        text.emit(Content)
        return False
    return True


def _opens_thinking(text: IncrementalText) -> Reading[None]:
    yield from text.read_spaces()
    if not (yield from text.accept(THINK_OPEN)):
        raise NotACall


def _json_calls(text: IncrementalText) -> Reading[None]:
    yield from text.read_spaces()
    if (yield from text.next_is("[")):
        yield from _list_of_calls(text)
        return
    yield from read_call(text)
    yield from text.skip_spaces()
    while (yield from text.next_is("{")):
        yield from read_call(text)
        yield from text.skip_spaces()


def _list_of_calls(text: IncrementalText) -> Reading[None]:
    yield from text.expect("[")
    yield from read_call(text)
    yield from text.skip_spaces()
    while (yield from text.expect(",]")) == ",":
        yield from read_call(text)
        yield from text.skip_spaces()
    text.discard()


def _mistral_calls(text: IncrementalText) -> Reading[None]:
    yield from text.read_spaces()
    if (yield from text.next_is("[")):
        yield from _list_of_calls(text)
    else:
        yield from _named_call(text)


def _named_call(text: IncrementalText) -> Reading[None]:
    name = yield from text.read_run(_NAME_CHARACTERS)
    if (yield from text.accept(MISTRAL_ID)):
        yield from text.read_run(_NAME_CHARACTERS)
    yield from text.accept(MISTRAL_ARGUMENTS)
    yield from text.read_spaces()
    if not (yield from text.next_is("{")):
        raise NotACall
    text.start_call(name)
    yield from read_arguments(text)
