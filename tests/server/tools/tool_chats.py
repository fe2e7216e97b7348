"""Chats with tools and thinking, for tests: templates and marks of models, requests, and how answers are read."""

import re
from pathlib import Path
from typing import Any

from tests.server.live_server import LiveServer
from tests.server.model_talk import WEATHER

GOLDEN = Path(__file__).parents[1] / "golden"
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
HERMES = "{{ tools | tojson if tools }}{# <tool_call> tool_calls #}" + TURNS
THINKING = TURNS + "{% if deep %}<think>\n{% endif %}"
MARKS = {"<tool_call>": 0xF8, "</tool_call>": 0xF9, "<think>": 0xFA, "</think>": 0xFB}


def function(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [function(parameters=WEATHER), function("get_time")]
ONLY_TIME = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("get_time")]}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def calls_in(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def exact_bytes(server: LiveServer, **parameters: Any) -> bytes:
    """Returns the body's bytes, times and the backend's fingerprint replaced."""
    body = server.chat(seed=1, headers={"X-Request-Id": "golden"}, **parameters).content
    return re.sub(rb'"created":\d+', b'"created":0', re.sub(rb"fp_[0-9a-f]{10}", b"fp_0", body))
