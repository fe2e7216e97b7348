"""The formats in which models write calls, each as a reader of a whole message.

A call that is not well-formed, or of a function that nobody offered, is content. So is text around calls; spaces and
signs behind a call are nothing. Once its arguments have begun a call is a call, however they go on.
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


def read_content(tape: IncrementalText) -> Reading[None]:
    """No calls."""
    tape.give(Content)
    while (yield from tape.arrived()):
        tape.give_all(Content)


def read_hermes(tape: IncrementalText) -> Reading[None]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>` (Hermes 2 Pro, Qwen 2.5 and 3)."""
    while (yield from tape.text_until(HERMES_OPEN)):
        if (yield from _attempt(tape, read_call)):
            yield from tape.drop_spaces()
            if (yield from tape.mark(HERMES_CLOSE)):
                tape.drop()
                yield from tape.drop_spaces()


def read_llama(tape: IncrementalText) -> Reading[None]:
    """`{"name": ..., "parameters": ...}` alone or behind `<|python_tag|>`; several with `;` between (Llama 3)."""
    is_due = True
    while True:
        if is_due and (yield from _attempt(tape, read_call)):
            yield from tape.drop_spaces()
            is_due = yield from tape.mark(";")
        elif (yield from tape.text_until(LLAMA_TAG)):
            is_due = True
        else:
            return


def read_mistral(tape: IncrementalText) -> Reading[None]:
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    while (yield from tape.text_until(MISTRAL_CALLS)):
        if (yield from _attempt(tape, _mistral_calls)):
            yield from tape.drop_spaces()


def read_json(tape: IncrementalText) -> Reading[None]:
    """The message begins with `{"name": ..., "arguments": ...}`: one, several in lines, or a list."""
    if (yield from _attempt(tape, _json_calls)):
        yield from tape.drop_spaces()
    yield from read_content(tape)


def after_thinking(reader: Reader, starts_inside: bool) -> Reader:
    """`<think>...</think>` before the message that `reader` reads. It may have been opened in the prompt."""

    def read(tape: IncrementalText) -> Reading[None]:
        if starts_inside or (yield from _attempt(tape, _opens_thinking)):
            tape.drop()
            yield from tape.text_until(THINK_CLOSE, Reasoning)
            tape.drop()
            yield from tape.drop_spaces()
        yield from reader(tape)

    return read


def _attempt(tape: IncrementalText, reader: Reader) -> Reading[bool]:
    """Whether `reader` found what it reads. If not, what it read is content."""
    try:
        yield from reader(tape)
    except NotACall:
        tape.give(Content)
        return False
    return True


def _opens_thinking(tape: IncrementalText) -> Reading[None]:
    yield from tape.spaces()
    if not (yield from tape.mark(THINK_OPEN)):
        raise NotACall


def _json_calls(tape: IncrementalText) -> Reading[None]:
    yield from tape.spaces()
    if (yield from tape.next_is("[")):
        yield from _list_of_calls(tape)
        return
    yield from read_call(tape)
    yield from tape.drop_spaces()
    while (yield from tape.next_is("{")):
        yield from read_call(tape)
        yield from tape.drop_spaces()


def _list_of_calls(tape: IncrementalText) -> Reading[None]:
    yield from tape.one_of("[")
    yield from read_call(tape)
    yield from tape.drop_spaces()
    while (yield from tape.one_of(",]")) == ",":
        yield from read_call(tape)
        yield from tape.drop_spaces()
    tape.drop()


def _mistral_calls(tape: IncrementalText) -> Reading[None]:
    yield from tape.spaces()
    if (yield from tape.next_is("[")):
        yield from _list_of_calls(tape)
    else:
        yield from _named_call(tape)


def _named_call(tape: IncrementalText) -> Reading[None]:
    name = yield from tape.word(_NAME_CHARACTERS)
    if (yield from tape.mark(MISTRAL_ID)):
        yield from tape.word(_NAME_CHARACTERS)
    yield from tape.mark(MISTRAL_ARGUMENTS)
    yield from tape.spaces()
    if not (yield from tape.next_is("{")):
        raise NotACall
    tape.start_call(name)
    yield from read_arguments(tape)
