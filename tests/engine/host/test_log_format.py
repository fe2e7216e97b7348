"""Lines of JSON in the log: one object each, whatever a message holds, and in child processes, too."""

import json
import os
import subprocess
import sys

SCRIPT = """
import logging
from engine.host.log_format import configure_root
configure_root("INFO")
logging.getLogger("a").warning("it's %s\\n%s", '"quoted"', "\\ud800")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("b").exception("failed", extra={"fields": {"number": 3, "other": {1}}})
"""


def logged(log_format: str) -> list[str]:
    """Returns the lines of a process that was started with this format."""
    environment = {**os.environ, "TWOSTEP_LOG_FORMAT": log_format}
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    return ended.stderr.splitlines()


def test_each_record_is_one_object() -> None:
    quoted, failed = map(json.loads, logged("json"))
    assert (quoted["level"], quoted["logger"], quoted["message"]) == ("warning", "a", 'it\'s "quoted"\n\ud800')
    assert quoted["time"].endswith("+00:00")
    assert failed["number"] == 3 and failed["exception"].endswith("ZeroDivisionError: division by zero")


def test_text_is_as_ever() -> None:
    first, *rest = logged("text")
    assert ' WARNING a: it\'s "quoted"' in first and rest[-1] == "ZeroDivisionError: division by zero"
