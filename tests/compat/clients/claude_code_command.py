"""Claude Code: a turn in which the model runs a command and searches the web, and reads what both returned.

Its requests are to stay on this machine: telemetry, updates and what else it can do without are off, and whatever
else it asks of the network goes to a proxy that is not there. The search is a request of its own, with a tool that its
vendor's servers would run: here the model answers without it.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

home = Path("home").absolute()
home.mkdir()
nowhere = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")}
quiet = {name: "1" for name in ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER")}
inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC_", "CLAUDE"))}
environment = {
    **inherited,
    **nowhere,
    **quiet,
    "NO_PROXY": "127.0.0.1",
    "HOME": str(home),
    "CLAUDE_CONFIG_DIR": str(home / "config"),
    "ANTHROPIC_BASE_URL": os.environ["TWOSTEP_URL"],
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": os.environ["TWOSTEP_MODEL"],
}
command = ["claude", "--print", "--output-format", "stream-json", "--verbose", "--model", os.environ["TWOSTEP_MODEL"]]


def ask(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*command, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


events = ask("Run the command.", "--allowedTools", "Bash", "WebSearch")
blocks = [block for event in events if event["type"] == "user" for block in event["message"]["content"]]
results = sorted(str(block["content"]) for block in blocks if block["type"] == "tool_result")
assert "Nothing was found." in results[0] and results[1] == "twostep-42", results
last = events[-1]
assert (last["type"], last["subtype"], last["is_error"]) == ("result", "success", False), last
assert last["result"] == "The command wrote twostep-42." and last["num_turns"] > 1
usage = last["usage"]
assert sum(usage[name] for name in usage if name.endswith("input_tokens")) > 10_000 and usage["output_tokens"] > 0

[*_, counted] = ask("/context")
assert not counted["is_error"] and "Tokens" in counted["result"], counted
