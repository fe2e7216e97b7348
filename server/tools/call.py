"""One call written as a JSON object: `{"name": ..., "arguments": {...}}`, in any order, `parameters` also allowed.

As soon as the name is known and the arguments begin, the arguments are given on as they come. What stands in another
order is held until it is complete.
"""

import json
from typing import Any

from server.tools.incremental_text import IncrementalText, NotACall, Reading
from server.tools.json_value import ValueEnd

ARGUMENT_KEYS = ("arguments", "parameters")


def read_call(tape: IncrementalText) -> Reading[None]:
    """Raises NotACall when what is held is no part of a call of a function that was offered."""
    yield from tape.one_of("{")
    members: dict[str, str] = {}
    while True:
        key = yield from _key(tape)
        if key in ARGUMENT_KEYS and "name" in members and (yield from tape.next_is("{")):
            tape.start_call(_string(members["name"]))
            yield from read_arguments(tape)
            yield from _rest(tape)
            return
        members[key] = yield from _value(tape)
        if (yield from tape.one_of(",}")) == "}":
            break
    arguments = _complete_arguments(members)
    tape.start_call(_string(members.get("name", "")))
    tape.add_arguments(arguments)


def read_arguments(tape: IncrementalText) -> Reading[None]:
    """Give the object that comes next on as it comes, whole or as far as the text goes."""
    end = ValueEnd()
    tape.is_cut = True
    while (yield from tape.arrived()):
        text, begin = tape.unread()
        found = end.find(text, begin)
        tape.give_arguments((len(text) if found is None else found) - begin)
        if found is not None:
            tape.is_cut = False
            return


def _rest(tape: IncrementalText) -> Reading[None]:
    """What follows the arguments in the object says nothing new. Some models forget the closing brace.

    Raises NotACall for what cannot follow: the call was made, that is none of it.
    """
    yield from tape.drop_spaces()
    while (yield from tape.mark(",")):
        yield from _key(tape)
        yield from _value(tape)
        tape.drop()
        yield from tape.drop_spaces()
    yield from tape.mark("}")
    tape.drop()


def _key(tape: IncrementalText) -> Reading[str]:
    yield from tape.spaces()
    key = _string((yield from _value(tape)))
    yield from tape.one_of(":")
    yield from tape.spaces()
    return key


def _value(tape: IncrementalText) -> Reading[str]:
    """The next value's text. Raises NotACall for what is not JSON."""
    begin, end = tape.num_held, ValueEnd()
    found = None
    while found is None and (yield from tape.arrived()):
        text, position = tape.unread()
        found = end.find(text, position)
        tape.hold((len(text) if found is None else found) - position)
    text = tape.held(begin)
    _parse(text)
    return text


def _complete_arguments(members: dict[str, str]) -> str:
    """As the model wrote them: an object, or an object as JSON in a string. None at all, or null, are an empty one."""
    text = next((members[key] for key in ARGUMENT_KEYS if members.get(key, "null") != "null"), "{}")
    value = _parse(text)
    if isinstance(value, str):
        text, value = value, _parse(value)
    if not isinstance(value, dict):
        raise NotACall
    return text


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
