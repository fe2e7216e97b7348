"""The process of a rank ends at once, whatever else in it waits."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys, threading
from engine.ranks.__main__ import end_with
threading.Thread(target=threading.Event().wait).start()  # as one does that waits for another rank's GPU
end_with(lambda: {})
"""


@pytest.mark.parametrize(("result", "code", "told"), [("0", 0, ""), ("2", 2, ""), ("1 // 0", 1, "ZeroDivisionError")])
def test_a_rank_ends_although_a_thread_waits(result: str, code: int, told: str) -> None:
    command = [sys.executable, "-c", PROGRAM.replace("{}", result)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code and told in ended.stderr
