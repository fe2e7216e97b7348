"""The program's engine process imports its libraries while the program imports the web framework."""

import subprocess
import sys

SPAWNED = """
import sys
from pathlib import Path

class Look:
    def find_spec(self, name, path, target=None):
        if name == "server.serve":
            children = Path("/proc/self/task").glob("*/children")
            pids = [pid for each in children for pid in each.read_text().split()]
            commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
            print([b"engine.process" in command for command in commands], "fastapi" in sys.modules)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Look())
sys.argv = ["twostep", "serve"]
from server.__main__ import main
sys.exit(main())
"""


def test_the_engine_process_is_there_before_the_web_framework() -> None:
    result = subprocess.run([sys.executable, "-c", SPAWNED], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[True] False\n", "")
