"""The clients, and an environment for each: a virtual environment, or a folder of npm's."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONSTRAINTS = Path(__file__).resolve().parent.parent.parent / "constraints.txt"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a scripted model answers to prompts that contain a text."""

    when: str
    text: str


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    packages: tuple[str, ...]
    """Packages to install; the first is the client itself."""
    script: str
    registry: Literal["pypi", "npm"] = "pypi"
    replies: tuple[Reply, ...] = ()
    """The script of the model that it is tried with, for agents; others are tried with the server's model."""
    models: tuple[str, ...] = ()
    """Further names of that model, which the client knows."""


@dataclass(frozen=True, slots=True)
class Installed:
    version: str
    interpreter: tuple[str, ...]
    """The command that runs a client's script."""
    programs: Path
    """The folder of the commands that came with the packages."""


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


_ADDING = (
    Reply("twostep-42", "The tool said twostep-42."),
    Reply('"add"', calling("add", '{"a": 40, "b": 2}')),
)
"""A call of a tool that adds, which says what the sum is behind "twostep-"."""
_WRONG_FILE, _RIGHT_FILE = (f"answer.py\n```python\nprint('twostep-{sum}')\n```\n" for sum in ("wrong", "42"))

CLIENTS = {
    client.name: client
    for client in (
        Client("openai", ("openai",), "openai_python.py"),
        Client("openai-node", ("openai",), "openai_node.mjs", "npm"),
        Client("anthropic", ("anthropic",), "anthropic_python.py"),
        Client("ollama", ("ollama",), "ollama_python.py"),
        Client("ollama-node", ("ollama",), "ollama_node.mjs", "npm"),
        Client("litellm", ("litellm",), "litellm_python.py"),
        Client("langchain", ("langchain-openai",), "langchain_python.py"),
        Client("instructor", ("instructor",), "instructor_python.py"),
        Client("llm", ("llm",), "llm_command.py"),
        Client("guidellm", ("guidellm",), "guidellm_command.py"),
        Client("schemathesis", ("schemathesis",), "schemathesis_command.py"),
        Client("lm-eval", ("lm-eval[api]", "transformers"), "lm_eval_command.py"),
        Client(
            "codex",
            ("@openai/codex",),
            "codex_command.py",
            "npm",
            replies=(
                Reply("twostep-42", "The command wrote twostep-42."),
                Reply('"exec_command"', calling("exec_command", '{"cmd": "echo twostep-$((40 + 2))"}')),
                Reply('"functions__exec"', calling("functions__exec", '{"input": "text(`twostep-${6 * 7}`);"}')),
            ),
            models=("codex-auto-review",),
        ),
        Client(
            "claude-code",
            ("@anthropic-ai/claude-code",),
            "claude_code_command.py",
            "npm",
            replies=(
                Reply("You are an assistant for performing a web search", "Nothing was found."),
                Reply("twostep-42", "The command wrote twostep-42."),
                Reply(
                    '"Bash"',
                    calling("Bash", '{"command": "echo twostep-$((40 + 2))", "description": "Adds"}')
                    + calling("WebSearch", '{"query": "twostep"}'),
                ),
            ),
        ),
        Client("ollama-tools", ("ollama",), "ollama_tools_python.py", replies=_ADDING),
        Client("openai-agents", ("openai-agents",), "openai_agents_python.py", replies=_ADDING),
        Client(
            "pydantic-ai",
            ("pydantic-ai-slim[openai,anthropic]",),
            "pydantic_ai_python.py",
            replies=_ADDING,
        ),
        Client(
            "smolagents",
            ("smolagents[openai]",),
            "smolagents_python.py",
            replies=(
                Reply("twostep-42", calling("final_answer", '{"answer": "The tool said twostep-42."}')),
                Reply('"add"', calling("add", '{"a": 40, "b": 2}')),
            ),
        ),
        Client("ai-sdk", ("ai", "@ai-sdk/openai-compatible", "zod"), "ai_sdk_node.mjs", "npm", replies=_ADDING),
        Client(
            "opencode",
            ("opencode-ai",),
            "opencode_command.py",
            "npm",
            replies=(
                Reply("twostep-42", "The command wrote twostep-42."),
                Reply(
                    '"bash"',
                    calling("bash", '{"command": "echo twostep-$((40 + 2))", "description": "Adds"}'),
                ),
                Reply("", "A title"),
            ),
        ),
        Client(
            "aider",
            ("aider-chat",),
            "aider_command.py",
            replies=(
                Reply("twostep-wrong", _RIGHT_FILE),
                Reply("", _WRONG_FILE),
            ),
        ),
    )
}


def install(client: Client, directory: Path) -> Installed:
    """Installs the client, unless that was done before."""
    home = directory / client.name
    home.mkdir(parents=True, exist_ok=True)
    return _install_npm(client, home) if client.registry == "npm" else _install_python(client, home)


def _install_python(client: Client, home: Path) -> Installed:
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        _run([sys.executable, "-m", "venv", str(home)])
        # Some clients depend on torch, whose default build is gigabytes of CUDA.
        torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
        (home / "constraints.txt").write_text(f"{torch}\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--constraint", str(home / "constraints.txt"), *client.packages])
        (home / "installed").touch()
    distribution = client.packages[0].partition("[")[0]
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return Installed(_run([str(python), "-c", code]).strip(), (str(python),), python.parent)


def _install_npm(client: Client, home: Path) -> Installed:
    if not (home / "installed").exists():
        _run(["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(home), *client.packages])
        (home / "installed").touch()
    version = json.loads((home / "node_modules" / client.packages[0] / "package.json").read_text())["version"]
    programs = home / "node_modules" / ".bin"
    if not client.script.endswith(".mjs"):
        return Installed(version, (sys.executable,), programs)
    # Modules are looked for beside the script that imports them: NODE_PATH does not count for those.
    loader = home / "run.mjs"
    loader.write_text(_NODE_LOADER)
    return Installed(version, ("node", str(loader)), programs)


_NODE_LOADER = """\
import { copyFileSync } from "node:fs";
const copy = new URL("script.mjs", import.meta.url);
copyFileSync(process.argv[2], copy);
await import(copy);
"""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
