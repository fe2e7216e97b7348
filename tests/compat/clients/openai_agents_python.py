"""OpenAI's Agents SDK: a turn with a call of a function and its result, over Responses and over chat, streamed and not.

Tracing is off: it would send what is done here to OpenAI.
"""

import asyncio
import os

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
calls = []


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    calls.append((a, b))
    return f"twostep-{a + b}"


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{os.environ['TWOSTEP_URL']}/v1", api_key="none")
    name = os.environ["TWOSTEP_MODEL"]
    models: list[Model] = [OpenAIResponsesModel(name, client), OpenAIChatCompletionsModel(name, client)]
    for model in models:
        agent = Agent(name="Adder", instructions="Use the tool.", model=model, tools=[add])
        whole = await Runner.run(agent, "What is 40 + 2?")
        assert whole.final_output == "The tool said twostep-42.", whole
        streamed = Runner.run_streamed(agent, "What is 40 + 2?")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == whole.final_output, streamed
        again = await Runner.run(agent, [*whole.to_input_list(), {"role": "user", "content": "And again?"}])
        assert again.final_output == whole.final_output, again
    assert calls == [(40, 2)] * 4, calls


asyncio.run(main())
