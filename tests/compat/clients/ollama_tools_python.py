"""Ollama's Python client: a turn with a call of a function and its result, streamed and not."""

import os

import ollama

client = ollama.Client(host=os.environ["TWOSTEP_URL"])
model = os.environ["TWOSTEP_MODEL"]
calls = []


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    calls.append((a, b))
    return f"twostep-{a + b}"


def turn(streams: bool) -> str:
    messages = [{"role": "user", "content": "What is 40 + 2?"}]
    while True:
        answer = client.chat(model, messages, tools=[add], stream=streams)
        parts = list(answer) if streams else [answer]
        text = "".join(part.message.content for part in parts)
        made = [call for part in parts for call in part.message.tool_calls or ()]
        assert parts[-1].done and parts[-1].done_reason == "stop"
        if not made:
            return text
        messages.append({"role": "assistant", "content": text, "tool_calls": made})
        for call in made:
            result = {"add": add}[call.function.name](**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})


for streams in (False, True):
    assert turn(streams) == "The tool said twostep-42."
assert calls == [(40, 2)] * 2, calls
