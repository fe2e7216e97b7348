"""Tools that tests offer to models, and texts that models generate: tool calls and thinking."""

from collections.abc import Callable

from engine.core.generation_request import GenerationRequest
from tests.server.byte_tokenizer import EOS
from tests.server.live_server import LiveServer

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESPONSES_TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": WEATHER},
    {"type": "function", "name": "get_time"},
]
ANTHROPIC_TOOLS = [
    {"name": "get_weather", "input_schema": WEATHER},
    {"name": "get_time", "input_schema": {"type": "object"}},
]
ANTHROPIC_USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
ANTHROPIC_CALL = {"role": "assistant", "content": [ANTHROPIC_USE]}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
THOUGHT = f'<think>Hm.</think>Let me see.{CALL}<tool_call>{{"name": "get_time", "arguments": {{}}}}</tool_call>'


def saying_tokens(server: LiveServer, text: str) -> Callable[[GenerationRequest, int], int]:
    """Returns a rule that generates the text, in which special tokens count as such, and then EOS."""
    ids = [*server.engine.tokenizer.encode(text, add_special_tokens=False), EOS]
    return lambda _, position: ids[position]


def prompt_of(server: LiveServer) -> str:
    tokenizer = server.engine.tokenizer
    return tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def turns_of(server: LiveServer) -> list[str]:
    """Returns the turns of the prompt, where the template begins each with its role in brackets: `user]Hi`."""
    return prompt_of(server).split("[")[1:]
