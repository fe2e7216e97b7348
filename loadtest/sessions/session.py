"""The conversation of one agent: a system prompt and tools that all agents of a run share, then turns that each send
all that was said before. Nothing here knows HTTP or time."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from loadtest.sessions.answer import Answer, ToolCall
from loadtest.workload import Conversation, Message, PromptSource, RequestSpec, Shape

_DESCRIPTION_WORDS = 20  # of a tool; it has two parameters, described in half as many words each


class Session:
    """One conversation. Each turn is a question, or the results of the tools that the model called the turn before."""

    def __init__(self, shape: Shape, opening: Conversation, seed: str) -> None:
        self._shape = shape
        self._messages = list(opening.messages)
        self._tools = opening.tools
        self._source = PromptSource(shape, seed)
        self._random = random.Random(f"{seed}/think")
        self._num_turns = 0

    def first_turn(self) -> RequestSpec:
        self._messages.append({"role": "user", "content": self._words()})
        return self._turn()

    def next_turn(self, answer: Answer) -> RequestSpec | None:
        """Returns the turn after this answer; None at the conversation's end."""
        if self._num_turns == self._shape.num_turns:
            return None
        calls = answer.calls if all(call.is_whole for call in answer.calls) else ()
        self._messages.append(_said(answer.text, calls))
        self._messages += [{"role": "tool", "tool_call_id": call.id, "content": self._words()} for call in calls]
        if not calls:
            self._messages.append({"role": "user", "content": self._words()})
        return self._turn()

    def think_s(self, mean_s: float) -> float:
        """Draws how long the next turn is thought about: an exponential distribution."""
        return self._random.expovariate(1 / mean_s) if mean_s else 0.0

    def _words(self) -> str:
        return str(self._source.render(self._source.draw(self._shape.prompt_len)))

    def _turn(self) -> RequestSpec:
        self._num_turns += 1
        prompt = Conversation(tuple(self._messages), self._tools)
        return RequestSpec("all", prompt, self._shape.output_len, turn=self._num_turns)


def session_stream(shape: Shape, seed: str) -> Iterator[Session]:
    """Yields sessions that share what they begin with and nothing else."""
    opening = _opening(shape, PromptSource(shape, f"{seed}/opening"))
    for number in count():
        yield Session(shape, opening, f"{seed}/{number}")


def _said(text: str, calls: tuple[ToolCall, ...]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _opening(shape: Shape, source: PromptSource) -> Conversation:
    system = ({"role": "system", "content": source.render(source.draw(shape.system_len))},) if shape.system_len else ()
    return Conversation(system, tuple(_tool(number, source) for number in range(shape.num_tools)))


def _tool(number: int, source: PromptSource) -> dict[str, Any]:
    name, *parameters = (str(source.render(source.draw(1))) for _ in range(3))
    described = {
        f"{parameter}_{place}": {"type": "string", "description": source.render(source.draw(_DESCRIPTION_WORDS // 2))}
        for place, parameter in enumerate(parameters)
    }
    return {
        "type": "function",
        "function": {
            "name": f"{name}_{number}",
            "description": source.render(source.draw(_DESCRIPTION_WORDS)),
            "parameters": {"type": "object", "properties": described, "required": list(described)},
        },
    }
