"""A session of a coding agent, of the tests' own making: 40 tools, a long system prompt, and 20 turns in each of which
the model calls tools and reads what they returned. The same conversation for each API, as its clients send it.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

NUM_TURNS = 20
NUM_TOOLS = 40
_WORDS = """
argument branch build cache call class client code commit config context copy current data default delete error event
field file filter folder format function header index input item key length line list load lock log match message
method module name node number object open option output package parse path pattern pool print process query queue
read record request response result return row run schema search server set size slice sort source stack state store
stream string table task test text thread time token tool tree type update user value version view with write
""".split()


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model thought, said and called, and what the tools returned."""

    thought: str
    said: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Session:
    system: tuple[str, ...]
    tools: tuple[dict[str, Any], ...]
    """Functions, as OpenAI's API has them."""
    task: str
    turns: tuple[Turn, ...]

    @classmethod
    def recorded(cls, seed: int = 0) -> "Session":
        rng = Random(seed)
        tools = tuple(_tool(rng, number) for number in range(NUM_TOOLS))
        system = (_text(rng, 60), "\n\n".join(_text(rng, 120) for _ in range(20)))
        return cls(system, tools, _text(rng, 40), tuple(_turn(rng, tools) for _ in range(NUM_TURNS)))


def _text(rng: Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words)).capitalize() + "."


def _tool(rng: Random, number: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, 4)
    properties = {name: {"type": "string", "description": _text(rng, 12)} for name in names[:3]}
    properties[names[3]] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "description": _text(rng, 8)}
    return {
        "name": f"{'mcp__' * (number % 3 == 0)}{'_'.join(rng.sample(_WORDS, 2))}_{number}",
        "description": _text(rng, 70),
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": names[:2],
            "additionalProperties": False,
        },
    }


def _turn(rng: Random, tools: tuple[dict[str, Any], ...]) -> Turn:
    called = rng.sample(tools, rng.choice((1, 1, 2)))
    calls = tuple((tool["name"], _arguments(rng, tool)) for tool in called)
    results = tuple("\n".join(f"{line}\t{_text(rng, 8)}" for line in range(1, 14)) for _ in calls)
    return Turn(_text(rng, 30), _text(rng, 15), calls, results)


def _arguments(rng: Random, tool: dict[str, Any]) -> dict[str, Any]:
    *names, numbers = tool["parameters"]["properties"]
    texts = {name: f'{_text(rng, 5)} "naïve"\n' for name in names}
    return texts | {numbers: [rng.randrange(1000), 0]}


def chat_requests(session: Session) -> list[dict[str, Any]]:
    """Returns the body of each turn's request to /v1/chat/completions."""
    tools = [{"type": "function", "function": tool} for tool in session.tools]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "\n".join(session.system)},
        {"role": "user", "content": [{"type": "text", "text": session.task}]},
    ]
    bodies = []
    for number, turn in enumerate(session.turns):
        bodies.append({"messages": [*messages], "tools": tools, "tool_choice": "auto", "stream": True})
        calls = [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(values)},
            }
            for index, (name, values) in enumerate(turn.calls)
        ]
        messages.append({"role": "assistant", "content": turn.said or None, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, turn.results, strict=True)
        ]
    return bodies


def messages_requests(session: Session) -> list[dict[str, Any]]:
    """Returns the body of each turn's request to /v1/messages, as Claude Code makes it: the first block of the system
    prompt differs in every request, and so do the places that are marked for caching."""
    tools = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in session.tools
    ]
    turns: list[dict[str, Any]] = [{"role": "user", "content": [_block(session.task)]}]
    bodies = []
    for number, turn in enumerate(session.turns):
        header = (
            f"x-anthropic-billing-header: cc_version=2.1.0.{number:03x}; cc_entrypoint=cli; cch={number * 7919:05x};"
        )
        system = [_block(header), *(_block(text) | _CACHED for text in session.system)]
        *earlier, last = turns
        *blocks, newest = last["content"]
        asked = [*earlier, {**last, "content": [*blocks, newest | _CACHED]}]
        bodies.append(
            {"system": system, "messages": asked, "tools": tools, "stream": True, "metadata": {"user_id": f"u{number}"}}
        )
        uses = [
            {"type": "tool_use", "id": f"toolu_{number}_{index}", "name": name, "input": values}
            for index, (name, values) in enumerate(turn.calls)
        ]
        thinking = {"type": "thinking", "thinking": turn.thought, "signature": f"s{number}"}
        turns.append({"role": "assistant", "content": [thinking, _block(turn.said), *uses]})
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": [_block(result)]}
            for use, result in zip(uses, turn.results, strict=True)
        ]
        turns.append({"role": "user", "content": results})
    return bodies


_CACHED = {"cache_control": {"type": "ephemeral"}}


def _block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
