"""The formats in which models write calls, each as a reader of a whole message.

A call that is malformed, or of a function that was not offered, is content. So is text around calls; spaces and marks
behind a call are discarded. Once its arguments have begun a call is a call, however they go on.
"""

from collections.abc import Callable

from server.tools.call import read_arguments, read_call
from server.tools.incremental_text import NAME_CHARACTERS, IncrementalText, NotACall, Reading, attempt
from server.tools.message_parts import Content

Reader = Callable[[IncrementalText], Reading[None]]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def read_content(text: IncrementalText) -> Reading[None]:
    """Reads a message without calls: all of it is content."""
    text.emit(Content)
    while (yield from text.arrived()):
        text.emit_all(Content)


def marked_objects(opening: str, closing: str) -> Reader:
    """Returns a reader of calls as JSON objects between marks, one or several, also in a list."""
    mark = (opening.split() or [""])[0]

    def read(text: IncrementalText) -> Reading[None]:
        while (yield from text.read_until(mark)):
            if (yield from attempt(text, read_block)):
                yield from text.skip_after_call()

    def read_block(text: IncrementalText) -> Reading[None]:
        if not (yield from text.accept_words(opening.lstrip().removeprefix(mark))):
            raise NotACall
        yield from text.read_spaces()
        if (yield from text.next_is("[")):
            yield from _list_of_calls(text)
        else:
            yield from read_call(text)
        yield from text.skip_spaces()
        if (yield from text.accept_words(closing)):
            text.discard()

    return read


def read_hermes(text: IncrementalText) -> Reading[None]:
    """Reads `<tool_call>{"name": ..., "arguments": ...}</tool_call>` (Hermes 2 Pro, Qwen 2.5 and 3)."""
    yield from marked_objects(HERMES_OPEN, HERMES_CLOSE)(text)


def read_llama(text: IncrementalText) -> Reading[None]:
    """Reads `{"name": ..., "parameters": ...}`, alone or behind `<|python_tag|>`; several with `;` between (Llama
    3)."""
    is_due = True
    while True:
        if is_due and (yield from attempt(text, read_call)):
            yield from text.skip_spaces()
            is_due = yield from text.accept(";")
        elif (yield from text.read_until(LLAMA_TAG)):
            is_due = True
        else:
            return


def read_mistral(text: IncrementalText) -> Reading[None]:
    """Reads `[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    while (yield from text.read_until(MISTRAL_CALLS)):
        if (yield from attempt(text, _mistral_calls)):
            yield from text.skip_spaces()


def read_json(text: IncrementalText) -> Reading[None]:
    """Reads a message that begins with `{"name": ..., "arguments": ...}`: one call, several in lines, or a list."""
    if (yield from attempt(text, _json_calls)):
        yield from text.skip_spaces()
    yield from read_content(text)


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
    name = yield from text.read_run(NAME_CHARACTERS)
    if (yield from text.accept(MISTRAL_ID)):
        yield from text.read_run(NAME_CHARACTERS)
    yield from text.accept(MISTRAL_ARGUMENTS)
    yield from text.read_spaces()
    if not (yield from text.next_is("{")):
        raise NotACall
    text.start_call(name)
    yield from read_arguments(text)
