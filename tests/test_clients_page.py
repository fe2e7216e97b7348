"""docs/clients.md tells people what the scripts of `tests.compat` do, which were run with the clients themselves."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.compat.environments import CLIENTS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "clients.md").read_text()
SCRIPTS = {client.name: (ROOT / "tests/compat/clients" / client.script).read_text() for client in CLIENTS.values()}


def block(title: str, language: str) -> str:
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return section.partition(f"```{language}\n")[2].partition("```")[0]


def assigned(script: str, name: str) -> ast.expr:
    """Returns what a script assigns to this name."""
    tree = ast.parse(SCRIPTS[script])
    return next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
    )


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yields the path of every field."""
    for name, each in value.items() if isinstance(value, dict) else ():
        yield f"{prefix}/{name}"
        yield from paths(each, f"{prefix}/{name}")


def test_every_agent_is_on_the_page() -> None:
    table = PAGE.partition("| client |")[2].partition("\n\n")[0]
    assert set(re.findall(r"\| `([\w-]+)` \|", table)) == {client.name for client in CLIENTS.values() if client.replies}


def test_variables_are_those_that_are_tried() -> None:
    titles = {"Claude Code": "claude-code", "OpenCode": "opencode", "Aider": "aider"}
    for title, name in titles.items():
        variables = re.findall(r"^export (\w+)=", block(title, "sh"), re.MULTILINE)
        assert variables and [each for each in variables if f'"{each}"' not in SCRIPTS[name]] == []


def test_options_of_commands_are_those_that_are_tried() -> None:
    for title, name in {"Claude Code": "claude-code", "Aider": "aider"}.items():
        options = re.findall(r" (--[\w-]+)", block(title, "sh"))
        assert options and [each for each in options if f'"{each}"' not in SCRIPTS[name]] == []


def test_codexs_configuration_is_the_one_that_is_tried() -> None:
    told, tried = (
        tomllib.loads(block("Codex CLI", "toml")),
        tomllib.loads(ast.literal_eval(assigned("codex", "CONFIG"))),
    )
    assert set(paths(told)) <= set(paths(tried))
    assert told["model_providers"]["twostep"]["wire_api"] == tried["model_providers"]["twostep"]["wire_api"]


def test_opencodes_configuration_is_the_one_that_is_tried() -> None:
    told, source = json.loads(block("OpenCode", "json")), ast.unparse(assigned("opencode", "CONFIG"))
    names = {path.rpartition("/")[2] for path in paths(told)} - {"NAME"}
    assert [name for name in names if f"'{name}'" not in source] == []
    assert told["provider"]["twostep"]["npm"] in source


def test_libraries_are_made_as_they_are_tried() -> None:
    table = PAGE.partition("\n## Libraries\n")[2]
    for name, made in {
        "openai-agents": ("OpenAIResponsesModel(", "set_tracing_disabled(True)", "base_url="),
        "pydantic-ai": ("OpenAIChatModel(", "OpenAIProvider(base_url="),
        "smolagents": ("OpenAIServerModel(", "api_base="),
        "ai-sdk": ("createOpenAICompatible(", "baseURL:"),
        "ollama": ("ollama.Client(host=",),
        "ollama-node": ("new Ollama({ host:",),
    }.items():
        assert all(each in table and each in SCRIPTS[name] for each in made), name
