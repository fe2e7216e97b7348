"""Tools in plain text, for chat templates that know nothing of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.tools.formats import Spelling

_INTRODUCTION = """\
You can call functions. To call one, answer with nothing but this, its name and arguments filled in:
{call}
To call two, answer with:
{calls}
These are the functions, with JSON schemas of their arguments:
{functions}"""
_EXAMPLE = ("NAME", '{"ARGUMENT": "VALUE"}')

Messages = Sequence[Mapping[str, Any]]


def tell_tools(
    messages: Messages, tools: Sequence[Mapping[str, Any]], spelling: Spelling, has_system: bool = True
) -> list[dict[str, Any]]:
    """The conversation with the tools told at the end of its system message, or, where the template has none, at the
    beginning of what the user says first."""
    told = _INTRODUCTION.format(
        call=spelling.of([_EXAMPLE]),
        calls=spelling.of([_EXAMPLE, _EXAMPLE]),
        functions="\n".join(_dumps(tool["function"]) for tool in tools),
    )
    first, *rest = map(dict, messages)
    if first["role"] == "user" and not has_system:
        return [first | {"content": f"{told}\n\n{_text_of(first)}"}, *rest]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": told}, first, *rest]
    return [first | {"content": f"{_text_of(first)}\n\n{told}"}, *rest]


def tell_calls(messages: Messages, spelling: Spelling) -> list[dict[str, Any]]:
    """The conversation with calls as the assistant's text, and with their results as the user's.

    Results of one turn and what the user says with them are one message: many templates want user and assistant to
    take turns.
    """
    told: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    are_results = False  # what was told last
    for message in messages:
        role = message["role"]
        goes_on = are_results and role in ("tool", "user")
        are_results = goes_on or role == "tool"
        if goes_on:
            told[-1]["content"] += f"\n{_said_by_user(message, names)}"
        elif role == "tool":
            told.append({"role": "user", "content": _said_by_user(message, names)})
        elif role == "assistant" and message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
            told.append(_without_calls(message, spelling))
        else:
            told.append(dict(message))
    return told


def _said_by_user(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """A call's result says of which."""
    if message["role"] != "tool":
        return _text_of(message)
    call_id = message["tool_call_id"]
    return f"Result of {names.get(call_id, call_id)}: {_text_of(message)}"


def _without_calls(message: Mapping[str, Any], spelling: Spelling) -> dict[str, Any]:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = spelling.of((function["name"], _arguments_of(function)) for function in functions)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": "\n".join(filter(None, [_text_of(message), calls]))}


def _arguments_of(function: Mapping[str, Any]) -> str:
    """What is no object is a string as the model wrote it."""
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else _dumps(arguments)


def _text_of(message: Mapping[str, Any]) -> str:
    match message.get("content"):
        case str(text):
            return text
        case None:
            return ""
        case parts:
            return "\n".join(part.get("text", "") for part in parts)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
