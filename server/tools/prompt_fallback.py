"""Tools and tool calls in plain text, for chat templates that do not support them."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.tools.json_text import json_text
from server.tools.spelling import Spelling

_INTRODUCTION = """\
You can call functions. To call one, answer with nothing but this, its name and arguments filled in:
{call}
To call two, answer with:
{calls}
These are the functions, with JSON schemas of their arguments:
{functions}"""
_EXAMPLE = ("NAME", '{"ARGUMENT": "VALUE"}')

Messages = Sequence[Mapping[str, Any]]


def describe_tools(
    messages: Messages, tools: Sequence[Mapping[str, Any]], spelling: Spelling, has_system: bool = True
) -> list[dict[str, Any]]:
    """Returns the conversation with the tools described at the end of its system message, or, where the template has
    none, at the beginning of the first user message."""
    description = _INTRODUCTION.format(
        call=spelling.of([_EXAMPLE]),
        calls=spelling.of([_EXAMPLE, _EXAMPLE]),
        functions="\n".join(json_text(tool["function"]) for tool in tools),
    )
    first, *rest = map(dict, messages)
    if first["role"] == "user" and not has_system:
        return [first | {"content": f"{description}\n\n{_text_of(first)}"}, *rest]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": description}, first, *rest]
    return [first | {"content": f"{_text_of(first)}\n\n{description}"}, *rest]


def calls_as_text(messages: Messages, spelling: Spelling) -> list[dict[str, Any]]:
    """Returns the conversation with calls as text of the assistant, and with their results as text of the user.

    Results of one turn and the user message behind them are one message: many templates want user and assistant to
    take turns.
    """
    converted: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    after_results = False
    for message in messages:
        role = message["role"]
        is_appended = after_results and role in ("tool", "user")
        after_results = is_appended or role == "tool"
        if is_appended:
            converted[-1]["content"] += f"\n{_user_text(message, names)}"
        elif role == "tool":
            converted.append({"role": "user", "content": _user_text(message, names)})
        elif role == "assistant" and message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
            converted.append(_without_calls(message, spelling))
        else:
            converted.append(dict(message))
    return converted


def _user_text(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Returns the text of a user message, or of a call's result, which names the function."""
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
    """Returns the arguments as JSON, or as the model wrote them where they are no object."""
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json_text(arguments)


def _text_of(message: Mapping[str, Any]) -> str:
    match message.get("content"):
        case str(text):
            return text
        case None:
            return ""
        case parts:
            return "\n".join(part.get("text", "") for part in parts)
