"""smolagents: an agent that calls a tool, reads its result and answers with another call; streamed and not."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(os.environ["TWOSTEP_MODEL"], api_base=f"{os.environ['TWOSTEP_URL']}/v1", api_key="none")
calls = []


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    calls.append((a, b))
    return f"twostep-{a + b}"


for stream in (False, True):
    agent = ToolCallingAgent(tools=[add], model=model, stream_outputs=stream, max_steps=4)
    assert agent.run("What is 40 + 2?") == "The tool said twostep-42."
assert calls == [(40, 2)] * 2, calls
