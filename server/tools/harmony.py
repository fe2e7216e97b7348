"""The messages of gpt-oss: each has a channel, which says whether it is a thought, content, or a call's arguments.

<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{"a": 1}<|call|>
"""

import re

from server.tools.call import read_arguments
from server.tools.incremental_text import IncrementalText, NotACall, Reading
from server.tools.message_parts import Content

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
FINAL = "<|channel|>final<|message|>"
"""The header of content."""
NEXT_MESSAGE = "<|start|>assistant"
"""What a message of the assistant begins with that follows another one in its turn."""
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", *_ENDS)
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
_MAX_HEADER = 500
_TO = r"(?:to=[\w.-]+)?\s*"
_HEADER = re.compile(
    rf"\s*(?:<\|start\|>\s*)?(?:assistant)?\s*{_TO}(?:<\|channel\|>\s*\w+)?\s*{_TO}(?:(?:<\|constrain\|>)?\s*\w+)?\s*"
    r"<\|message\|>",
    re.ASCII,
)
_BEGINNING = re.compile(r"<\|?(?!.*<\|(?:end|call|return)\|>)[\w.=<|>\s-]*", re.ASCII | re.DOTALL)
"""A header that is cut off."""


def read_harmony(text: IncrementalText) -> Reading[None]:
    """Reads messages with channels. Text without a header is content."""
    text.emit(Content)
    while not (yield from text.is_over()):
        header = yield from _read_header(text)
        function = _FUNCTION.search(header)
        if function and (yield from _read_call(text, function[1])):
            yield from _read_end(text)
            continue
        if not function and "analysis" in header:
            yield from text.read_thought_until((*_ENDS, START))
            continue
        text.discard()
        yield from text.read_until_any((*_ENDS, START), Content)
        text.discard()


def _read_header(text: IncrementalText) -> Reading[str]:
    """Reads what stands before a message's text, and returns it; nothing if there is none."""
    begin = text.num_held
    has_header = False
    for mark in (START, CHANNEL, "to=", "assistant"):
        has_header = has_header or (yield from text.accept_words(mark))
        text.unread_to(begin)
    while has_header and (yield from text.arrived()) and text.num_held - begin < _MAX_HEADER:
        if (yield from text.accept(MESSAGE)):
            if _HEADER.fullmatch(text.held(begin)):
                return text.held(begin)
            break
        text.hold(1)
    if (yield from text.is_over()) and _BEGINNING.fullmatch(text.held(begin)):
        text.discard()
        return ""
    text.unread_to(begin)
    return ""


def _read_call(text: IncrementalText, name: str) -> Reading[bool]:
    """Reads the arguments of a call; False, and nothing read, if it is none of an offered function."""
    held = text.num_held
    yield from text.read_spaces()
    try:
        if (yield from text.next_is("{")):
            text.start_call(name)
            yield from read_arguments(text)
            return True
    except NotACall:
        pass
    text.unread_to(held)
    return False


def _read_end(text: IncrementalText) -> Reading[None]:
    yield from text.skip_spaces()
    for mark in _ENDS:
        if (yield from text.accept(mark)):
            text.discard()
            return
