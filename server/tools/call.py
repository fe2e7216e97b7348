"""One call written as a JSON object: `{"name": ..., "arguments": {...}}`, in any order; also with `tool_name` and
`parameters`.

Once the name is known and the arguments begin, the arguments are emitted as they arrive. A call in another order is
held until it is complete.
"""

import json
from collections.abc import Mapping
from typing import Any

from server.tools.incremental_text import IncrementalText, NotACall, Reading
from server.tools.json_value import ValueEnd

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
_SILENT_KEYS = {*NAME_KEYS, "id", "type", "tool_call_id"}


def read_call(text: IncrementalText) -> Reading[None]:
    """Reads one call. Raises NotACall when what is held cannot be part of a call of an offered function."""
    yield from text.expect("{")
    members: dict[str, str] = {}
    while True:
        key = yield from _key(text)
        if key in ARGUMENT_KEYS and (name := _name(members)) and (yield from text.next_is("{")):
            text.start_call(_string(name))
            yield from read_arguments(text)
            yield from _rest(text)
            return
        members[key] = yield from _value(text)
        if (yield from text.expect(",}")) == "}":
            break
    arguments = _complete_arguments(members)
    if not members.keys() & {*ARGUMENT_KEYS} and members.keys() - _SILENT_KEYS:
        raise NotACall  # its arguments have other names, and would be lost
    text.start_call(_string(_name(members)))
    text.add_arguments(arguments)


def read_arguments(text: IncrementalText) -> Reading[None]:
    """Emits the object that comes next as arguments while it arrives, to its end or to the end of the text."""
    end = ValueEnd()
    text.is_cut = True
    while (yield from text.arrived()):
        received, begin = text.unread()
        found = end.find(received, begin)
        text.emit_arguments((len(received) if found is None else found) - begin)
        if found is not None:
            text.is_cut = False
            return


def _rest(text: IncrementalText) -> Reading[None]:
    """Skips what follows the arguments in the object, of which no member matters. Some models forget the closing brace.

    Raises NotACall for text that cannot follow: the call stands, but that text is no part of it.
    """
    yield from text.skip_spaces()
    while (yield from text.accept(",")):
        yield from _key(text)
        yield from _value(text)
        text.discard()
        yield from text.skip_spaces()
    yield from text.accept("}")
    text.discard()


def _key(text: IncrementalText) -> Reading[str]:
    yield from text.read_spaces()
    key = _string((yield from _value(text)))
    yield from text.expect(":")
    yield from text.read_spaces()
    return key


def _value(text: IncrementalText) -> Reading[str]:
    """Returns the next value's text. Raises NotACall if it is not JSON."""
    begin, end = text.num_held, ValueEnd()
    found = None
    while found is None and (yield from text.arrived()):
        received, position = text.unread()
        found = end.find(received, position)
        text.hold((len(received) if found is None else found) - position)
    value = text.held(begin)
    _parse(value)
    return value


def _complete_arguments(members: dict[str, str]) -> str:
    """Returns the arguments as the model wrote them, taken out of a string if they are in one; `{}` if there are none,
    or null. Raises NotACall if they are no object."""
    text = next((members[key] for key in ARGUMENT_KEYS if members.get(key, "null") != "null"), "{}")
    value = _parse(text)
    if isinstance(value, str):
        text, value = value, _parse(value)
    if not isinstance(value, dict):
        raise NotACall
    return text


def _name(members: Mapping[str, str]) -> str:
    """Returns the name as JSON; an empty text if there is none yet."""
    return next((members[key] for key in NAME_KEYS if key in members), "")


def _string(text: str) -> str:
    value = _parse(text)
    if not isinstance(value, str):
        raise NotACall
    return value


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACall from None
