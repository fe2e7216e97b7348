"""Pydantic AI: a turn with a call of a function and its result, over chat, Responses and Messages, streamed and not."""

import asyncio
import os

from anthropic import AsyncAnthropic
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, name = os.environ["TWOSTEP_URL"], os.environ["TWOSTEP_MODEL"]
openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=url, api_key="none"))
models: list[Model] = [
    OpenAIChatModel(name, provider=openai),
    OpenAIResponsesModel(name, provider=openai),
    AnthropicModel(name, provider=anthropic),
]


async def main() -> None:
    for model in models:
        calls = []
        agent = Agent(model, instructions="Use the tool.")

        @agent.tool_plain
        def add(a: int, b: int) -> str:
            """Add two numbers."""
            calls.append((a, b))  # noqa: B023 - it is called within the loop's turn
            return f"twostep-{a + b}"

        whole = await agent.run("What is 40 + 2?")
        assert whole.output == "The tool said twostep-42.", whole
        assert whole.usage().input_tokens > 0
        async with agent.run_stream("What is 40 + 2?") as streamed:
            assert await streamed.get_output() == whole.output
        again = await agent.run("And again?", message_history=whole.all_messages())
        assert again.output == whole.output
        assert calls == [(40, 2)] * 2, calls


asyncio.run(main())
