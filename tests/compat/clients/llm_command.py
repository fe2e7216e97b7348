"""The `llm` command: a model of an OpenAI-compatible server, declared as its documentation says."""

import os
import subprocess
from pathlib import Path

home = Path("llm").absolute()
home.mkdir()
(home / "extra-openai-models.yaml").write_text(
    "- model_id: mine\n"
    f"  model_name: {os.environ['TWOSTEP_MODEL']}\n"
    f"  api_base: {os.environ['TWOSTEP_URL']}/v1\n"
    "  api_key_name: mine\n"
)
environment = os.environ | {"LLM_USER_PATH": str(home)}


def llm(*arguments: str) -> str:
    command = ["llm", *arguments, "-m", "mine", "--key", "none", "-o", "max_tokens", "12", "-o", "seed", "1"]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


question = "Say something about lists."
assert llm(question).strip() == llm(question, "--no-stream").strip() != ""
