"""Codex CLI: a turn in which the model runs a command, and reads what it wrote.

Its requests are to stay on this machine: analytics and the search for updates are off, and whatever else it asks of the
network goes to a proxy that is not there. Its sandbox needs rights that few containers give, so it is off, too.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

CONFIG = """\
model = "{model}"
model_provider = "twostep"
check_for_update_on_startup = false
web_search = "live"

[analytics]
enabled = false

[model_providers.twostep]
name = "twostep"
base_url = "{url}/v1"
env_key = "TWOSTEP_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
home = Path("home").absolute()
home.mkdir()
(home / "config.toml").write_text(CONFIG.format(model=os.environ["TWOSTEP_MODEL"], url=os.environ["TWOSTEP_URL"]))
nowhere = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")}
environment = os.environ | nowhere | {"NO_PROXY": "127.0.0.1", "CODEX_HOME": str(home), "TWOSTEP_KEY": "none"}
command = ["codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]


def items_of_turn(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*command, *arguments, "Run it."], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    *events, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last["type"] == "turn.completed" and last["usage"]["input_tokens"] > 0
    return [event["item"] for event in events if event["type"] == "item.completed"]


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["text"] for item in items if item["type"] == "agent_message"]


ran, *others = [item for item in items_of_turn() if item["type"] != "error"]
assert (ran["type"], ran["exit_code"], ran["aggregated_output"]) == ("command_execution", 0, "twostep-42\n"), ran
assert texts(others) == ["The command wrote twostep-42."]

# A model for which it offers one custom tool, with a grammar, as an item of the input.
assert texts(items_of_turn("--model", "codex-auto-review")) == ["The command wrote twostep-42."]
