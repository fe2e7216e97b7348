"""The format of a model's calls, learned from its chat template: a few synthetic calls are rendered and compared.

    X1 = begin before_name NAME before_arguments ARGUMENTS after_arguments end
    X2 = begin before_name NAME before_arguments ARGUMENTS after_arguments between before_name NAME ...

What two renderings have in common, up to the nearest whole mark, is one of these texts.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product, takewhile
from typing import Any

from server.tools.named_ids import with_named_ids
from server.tools.spelling import (
    HOLE,
    MARK,
    JsonArguments,
    LiteralArguments,
    Spelling,
    TaggedArguments,
)

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, Sequence[dict[str, Any]]], str | None]
"""Renders messages and tools; None if the template refuses them."""

_FIRST, _SECOND = "fnAlpha", "fnBeta"
_IDS = ("callX0000", "callY0000")
_KEYS, _VALUES = ("keyOne", "keyTwo"), ("vAluEone", "vAluEtwo")
_TEXT = "¤text¤"
_AWKWARD = 'a <b> & "c"\n\\d'
USER = {"role": "user", "content": "Hello"}
_THOUGHT = re.compile(r"^\s*(?:<[^<>]*think[^<>]*>\s*){1,2}", re.IGNORECASE)
"""The marks of an empty thought, or its end, which some templates write before calls."""
_STRINGS = dict(zip(_KEYS, _VALUES, strict=True))


def _tool(name: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": key} for key in _KEYS}
    parameters = {"type": "object", "properties": properties, "required": list(_KEYS)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [_tool(_FIRST), _tool(_SECOND)]


def assistant(*calls: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns a message of the assistant with these calls, each of a name and arguments."""
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(_IDS, calls, strict=False)
    ]
    return {"role": "assistant", "content": "", **({"tool_calls": made} if made else {}), **fields}


def writes_calls(render: Render) -> bool:
    """Whether the template writes earlier calls."""
    return _calls_text(render, (_FIRST, _STRINGS)) is not None


def naming_ids(render: Render) -> Render:
    """Returns a function that renders messages whose calls have ids that name the function."""
    return lambda messages, tools: render(with_named_ids(messages), tools)


def learn_spelling(render: Render) -> Spelling | None:
    """Returns how the template writes calls; None if that cannot be told from what it writes."""
    one = _calls_text(render, (_FIRST, _STRINGS))
    if one is None:
        return None
    before, rest = one.split(_FIRST, 1)
    notation = _json_notation(rest) or _literal_notation(rest) or _tagged_notation(render, rest)
    if notation is None:
        return None
    arguments = _json_object(rest) or notation.write(json.dumps(_STRINGS))
    before_arguments, found, after = rest.partition(arguments)
    if not found:
        return None
    single = Spelling(before, before_arguments, after.rstrip(), "", arguments=notation, is_single=True)
    two = _calls_text(render, (_FIRST, _STRINGS), (_SECOND, _STRINGS))
    spelling = _without_leading_space(_without_end_of_turn(_with_two_calls(single, two, arguments)))
    is_clean = not any(probe in text for text in spelling.texts for probe in (_FIRST, _SECOND, *_KEYS, *_VALUES))
    return spelling if is_clean and spelling.opening else None


def _without_leading_space(spelling: Spelling) -> Spelling:
    """Returns the spelling without spaces before its first mark, which would be content; between calls they stay."""
    if spelling.begin.strip():
        return replace(spelling, begin=spelling.begin.lstrip())
    name = spelling.before_name.lstrip()
    space = spelling.before_name.removesuffix(name)
    return replace(spelling, begin="", before_name=name, between=spelling.between + space)


def _without_end_of_turn(spelling: Spelling) -> Spelling:
    """Returns the spelling without marks at its end that close nothing which was opened: they end the turn."""
    marks, num_opened = list(MARK.finditer(spelling.end)), len(MARK.findall(spelling.begin))
    if len(marks) > num_opened:
        return replace(spelling, end=spelling.end[: marks[num_opened].start()].rstrip())
    if spelling.is_single and len(marks := list(MARK.finditer(spelling.after_arguments))) > 1:
        return replace(spelling, after_arguments=spelling.after_arguments[: marks[-1].start()].rstrip())
    return spelling


def _with_two_calls(single: Spelling, two: str | None, arguments: str) -> Spelling:
    """Returns the spelling with what separates calls, from the text of two; `single` if there are none such."""
    head = single.before_name + _FIRST + single.before_arguments + arguments
    if two is None or not two.startswith(head) or two.count(arguments) != 2 or _SECOND not in two:
        return single
    middle, before_arguments = two.removeprefix(head).rsplit(arguments, 1)[0].rsplit(_SECOND, 1)
    pre, middle = _numbered(single.before_name, middle)
    first, second = _numbered(single.before_arguments, before_arguments)
    if first != second:
        return single
    before_name = _whole_suffix(_common_suffix(pre, middle))
    separated = middle.removesuffix(before_name)
    after = _whole_prefix(_common_prefix(separated, single.after_arguments)).rstrip()
    return replace(
        single,
        begin=pre.removesuffix(before_name),
        before_name=before_name,
        before_arguments=first,
        after_arguments=after,
        between=separated.removeprefix(after),
        end=single.after_arguments.removeprefix(after).rstrip(),
        is_single=False,
    )


def _numbered(first: str, second: str) -> tuple[str, str]:
    """Returns the texts with a HOLE for a number that is 0 in the first and 1 in the second, if they have one."""
    holed = re.sub(r"(?<!\d)0(?!\d)", HOLE, first), re.sub(r"(?<!\d)1(?!\d)", HOLE, second)
    is_better = len(_common_suffix(*holed)) > len(_common_suffix(first, second))
    return holed if is_better else (first, second)


def _calls_text(render: Render, *calls: tuple[str, dict[str, Any]]) -> str | None:
    """Returns what the template writes for a message with these calls, without what it writes around any message; None
    if it does not write all of them."""
    plain = render([USER, assistant(content=_TEXT)], TOOLS)
    for content, write in product(("", None), (dict, json.dumps)):
        shaped = [(name, write(arguments)) for name, arguments in calls]
        rendered = render([USER, assistant(*shaped, content=content)], TOOLS)
        if rendered is not None and plain is not None:
            text = _difference(rendered, plain)
            if all(name in text for name, _ in calls):
                return text
    return None


def _difference(rendered: str, plain: str) -> str:
    text = rendered.removeprefix(_whole_prefix(_common_prefix(rendered, plain)))
    text = text.removesuffix(_whole_suffix(_common_suffix(text, plain)))
    for call_id in _IDS:
        text = text.replace(call_id, HOLE)
    return _THOUGHT.sub("", _without_broken_mark(text))


def _without_broken_mark(text: str) -> str:
    """Returns the text without a mark that only begins at its end: the ends of two messages may share the rest."""
    return text[: text.rindex("<")] if re.search(r"<[^<>]*$", text) else text


def _json_notation(rest: str) -> JsonArguments | None:
    return JsonArguments() if _json_object(rest) else None


def _json_object(rest: str) -> str:
    """Returns the text of the arguments if they are written as a JSON object, else an empty one."""
    begin = rest.rfind("{", 0, rest.find(_KEYS[0]))
    try:
        value, end = json.JSONDecoder().raw_decode(rest, begin) if begin >= 0 else (None, 0)
    except ValueError:
        return ""
    return rest[begin:end] if value == _STRINGS else ""


def _literal_notation(rest: str) -> LiteralArguments | None:
    """Returns the notation of `(key='value', ...)` and its like."""
    found = re.match(rf"([({{]){_KEYS[0]}([=:])(\S{{1,8}}?){_VALUES[0]}\3,\s*{_KEYS[1]}", rest)
    if found is None:
        return None
    opening, assign, quote = found.groups()
    return LiteralArguments(opening, assign, ")" if opening == "(" else "}", quote)


def _tagged_notation(render: Render, rest: str) -> TaggedArguments | None:
    """Returns the notation in which each argument stands between marks."""
    found = _split_at(rest, _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])
    if found is None:
        return None
    start, after_key, middle, after_second_key, end = found
    before_key = _whole_suffix(_common_suffix(start, middle)).lstrip()
    after_value = _whole_prefix(_common_prefix(middle.removesuffix(before_key), end)).rstrip()
    if not (before_key and after_key.strip() and after_value.strip()) or after_key != after_second_key:
        return None
    between = middle.removesuffix(before_key).removeprefix(after_value)
    marks = TaggedArguments(before_key, after_key, after_value, between)
    as_it_is = f"{_KEYS[0]}{after_key}{_AWKWARD}{after_value}"
    if as_it_is not in (_calls_text(render, (_FIRST, {_KEYS[0]: _AWKWARD})) or ""):
        return None  # it escapes some texts
    return _with_other_values(render, marks)


def _split_at(text: str, *probes: str) -> list[str] | None:
    """Returns the texts around the probes, each where it comes first behind the one before; None if one is missing."""
    texts = []
    for probe in probes:
        before, found, text = text.partition(probe)
        if not found:
            return None
        texts.append(before)
    return [*texts, text]


def _with_other_values(render: Render, marks: TaggedArguments) -> TaggedArguments:
    """Returns the notation with how values are written that are no strings."""
    text = _calls_text(render, (_FIRST, {_KEYS[0]: True})) or ""
    found = re.search(f"{re.escape(marks.before_key)}{_KEYS[0]}(.*?)([tT]rue)", text, re.DOTALL)
    if found is None:
        return marks
    after_key = found[1] if found[1] != marks.after_key else None
    return replace(marks, after_key_of_other=after_key, has_python_constants=found[2] == "True")


def _common_prefix(first: str, second: str) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in pairs)


def _common_suffix(first: str, second: str) -> str:
    return _common_prefix(first[::-1], second[::-1])[::-1]


def _whole_prefix(text: str) -> str:
    """Returns the text without a mark that is cut off at its end."""
    return re.sub(r"(?:<[^<>]*|\[[A-Z_/]*)$", "", text)


def _whole_suffix(text: str) -> str:
    """Returns the text without a mark that is cut off at its beginning."""
    return re.sub(r"^(?:[^<>]*>|[A-Z_/]*\])", "", text)


def id_length_of(render: Render) -> int | None:
    """Returns the only length of ids that the template takes; None if it takes any."""
    call = (_FIRST, _STRINGS)
    long = assistant(call)
    long["tool_calls"][0]["id"] = "call_" + "0" * 24
    takes_long, takes_short = (render([USER, message], TOOLS) is not None for message in (long, assistant(call)))
    return len(_IDS[0]) if takes_short and not takes_long else None
