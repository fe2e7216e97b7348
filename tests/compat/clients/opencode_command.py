"""OpenCode: a turn in which the model runs a command, and reads what it wrote.

Its requests are to stay on this machine: updates, sharing and the list of models are off, and whatever else it asks of
the network goes to a proxy that is not there.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

MODEL = os.environ["TWOSTEP_MODEL"]
CONFIG = {
    "autoupdate": False,
    "share": "disabled",
    "enabled_providers": ["twostep"],
    "model": f"twostep/{MODEL}",
    "small_model": f"twostep/{MODEL}",
    "permission": {"*": "allow"},
    "provider": {
        "twostep": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "twostep",
            "options": {"baseURL": f"{os.environ['TWOSTEP_URL']}/v1", "apiKey": "none"},
            "models": {MODEL: {"name": MODEL, "tool_call": True, "limit": {"context": 100_000, "output": 8_000}}},
        }
    },
}
home = Path("home").absolute()
project = Path("project").absolute()
project.mkdir()
(project / "opencode.json").write_text(json.dumps(CONFIG))
nowhere = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")}
quiet = ("OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD", "OPENCODE_DISABLE_DEFAULT_PLUGINS")
environment = {
    **os.environ,
    **nowhere,
    **dict.fromkeys(quiet, "1"),
    "NO_PROXY": "127.0.0.1",
    "HOME": str(home),
    "PWD": str(project),  # where it looks for its configuration
    **{f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "STATE")},
}
command = ["opencode", "run", "--format", "json", "Run it."]
done = subprocess.run(
    command, cwd=project, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
)
print(done.stdout, done.stderr)
assert done.returncode == 0
events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
[used] = [event["part"] for event in events if event["type"] == "tool_use"]
assert used["tool"] == "bash" and used["state"]["output"].strip() == "twostep-42", used
said = [event["part"]["text"] for event in events if event["type"] == "text"]
assert said[-1].strip() == "The command wrote twostep-42.", said
