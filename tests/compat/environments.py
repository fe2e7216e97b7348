"""The clients, and an environment for each: a virtual environment, or a folder of npm's."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent.parent / "constraints.txt"


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    packages: tuple[str, ...]
    """Packages to install; the first is the client itself."""
    script: str

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS = {
    client.name: client
    for client in (
        Client("openai", ("openai",), "openai_python.py"),
        Client("openai-node", ("openai",), "openai_node.mjs"),
        Client("anthropic", ("anthropic",), "anthropic_python.py"),
        Client("litellm", ("litellm",), "litellm_python.py"),
        Client("langchain", ("langchain-openai",), "langchain_python.py"),
        Client("instructor", ("instructor",), "instructor_python.py"),
        Client("llm", ("llm",), "llm_command.py"),
        Client("guidellm", ("guidellm",), "guidellm_command.py"),
        Client("schemathesis", ("schemathesis",), "schemathesis_command.py"),
        Client("lm-eval", ("lm-eval[api]", "transformers"), "lm_eval_command.py"),
    )
}


def install(client: Client, directory: Path) -> tuple[list[str], str]:
    """Installs the client, unless that was done before, and returns the command that runs a script there, and its
    version."""
    home = directory / client.name
    home.mkdir(parents=True, exist_ok=True)
    return _install_node(client, home) if client.is_node else _install_python(client, home)


def _install_python(client: Client, home: Path) -> tuple[list[str], str]:
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
    return [str(python)], _run([str(python), "-c", code]).strip()


def _install_node(client: Client, home: Path) -> tuple[list[str], str]:
    if not (home / "installed").exists():
        _run(["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(home), *client.packages])
        (home / "installed").touch()
    package = json.loads((home / "node_modules" / client.packages[0] / "package.json").read_text())
    # Modules are looked for beside the script that imports them: NODE_PATH does not count for those.
    loader = home / "run.mjs"
    loader.write_text(_NODE_LOADER)
    return ["node", str(loader)], str(package["version"])


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
