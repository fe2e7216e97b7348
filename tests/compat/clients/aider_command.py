"""Aider: it writes the file that the model wants, runs the test, and sends back what that said until it passes.

Aider calls no tools: edits are text. Its requests are to stay on this machine: analytics, the search for updates and
the list of prices are off, and whatever else it asks of the network goes to a proxy that is not there.
"""

import os
import subprocess
from pathlib import Path

home = Path("home").absolute()
home.mkdir()
nowhere = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")}
environment = {
    **os.environ,
    **nowhere,
    "NO_PROXY": "127.0.0.1",
    "HOME": str(home),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_BASE": f"{os.environ['TWOSTEP_URL']}/v1",
    "OPENAI_API_KEY": "none",
}
test = "import subprocess, sys; said = subprocess.check_output([sys.executable, 'answer.py'], text=True)"
Path("check.py").write_text(f"{test}\nsys.exit(said != 'twostep-42\\n' and f'It said {{said}}')\n")
quiet = ["--analytics-disable", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes", "--no-git"]
command = [
    *("aider", "--model", f"openai/{os.environ['TWOSTEP_MODEL']}", "--edit-format", "whole", "--yes-always"),
    *("--no-pretty", "--no-detect-urls", *quiet),
    *("--auto-test", "--test-cmd", "python3 check.py", "--message", "Write answer.py.", "answer.py"),
]
done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
print(done.stdout, done.stderr)
assert done.returncode == 0
assert Path("answer.py").read_text() == "print('twostep-42')\n"
assert "twostep-wrong" in done.stdout
