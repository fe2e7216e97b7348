"""Invalid tools, in requests and in their history, are refused by their place."""

from typing import Any

import pytest

from tests.server.events import error_of
from tests.server.live_server import LiveServer
from tests.server.tools.tool_chats import TOOLS, function

DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": {"x": DEEP}}


@pytest.mark.parametrize(
    ("param", "parameters"),
    [
        ("tools", {"tools": {}}),
        ("tools", {"tools": [function(f"f{index}") for index in range(4097)]}),
        ("tools", {"tools": [function(f"f{index}", description="x" * 2**18) for index in range(5)]}),
        ("tools.0.type", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        ("tools.0.type", {"tools": [{"function": {"name": "f"}}]}),
        ("tools.0.function", {"tools": [{"type": "function"}]}),
        ("tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
        ("tools.1.function.name", {"tools": [function(), function("a b")]}),
        ("tools.0.function.name", {"tools": [function("x" * 129)]}),
        ("tools.0.function.name", {"tools": [function("f\n")]}),
        ("tools.1.function.name", {"tools": [function(), function()]}),
        ("tools.0.function.description", {"tools": [function(description=1)]}),
        ("tools.0.function.strict", {"tools": [function(strict="yes")]}),
        ("tools.0.function.parameters", {"tools": [function(parameters=[])]}),
        ("tools.0.function.parameters", {"tools": [function(parameters={"type": "string"})]}),
        ("tools.0.function.parameters", {"tools": [function(parameters=DEEP)]}),
        ("tools.0.function.parameters", {"tools": [function(parameters={"properties": {"\ud800": {}}})]}),
        ("tools.0.function.parameters", {"tools": [function(parameters={"enum": ["a", ["\0"]]})]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": function(), "tools": []}),
        ("tool_choice", {"tool_choice": "any", "tools": TOOLS}),
        ("tool_choice", {"tool_choice": 1, "tools": TOOLS}),
        ("tool_choice.type", {"tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": TOOLS}),
        ("tool_choice.function", {"tool_choice": {"type": "function"}, "tools": TOOLS}),
        ("tool_choice.function.name", {"tool_choice": function("f"), "tools": TOOLS}),
        (
            "tool_choice.allowed_tools.mode",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": TOOLS}}, "tools": TOOLS},
        ),
        (
            "tool_choice.allowed_tools.tools.0.function.name",
            {
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("f")]}},
                "tools": TOOLS,
            },
        ),
        ("parallel_tool_calls", {"parallel_tool_calls": 1, "tools": TOOLS}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("function_call", {"function_call": "auto"}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"tools": []}}),
    ],
)
def test_what_cannot_be_is_refused_by_its_place(server: LiveServer, param: str, parameters: dict[str, Any]) -> None:
    response = server.chat(**parameters)
    assert response.status_code == 400 and error_of(response)["param"] == param
    assert len(response.text) < 500


def test_arguments_in_the_history_must_be_a_string(server: LiveServer) -> None:
    for arguments in ({}, [], 1):
        call = {"id": "c1", **function(arguments=arguments)}
        error = error_of(server.chat([{"role": "assistant", "tool_calls": [call]}]))
        assert error["param"] == "messages.0.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    "parameters",
    [
        {"tools": []},
        {"tools": None},
        {"tools": [], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tool_choice": "auto", "parallel_tool_calls": True},
    ],
)
def test_no_tools_are_no_tools(server: LiveServer, parameters: dict[str, Any]) -> None:
    assert server.chat(**parameters).status_code == 200
