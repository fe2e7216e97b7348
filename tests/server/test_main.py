"""The program while it imports, and with its standard output closed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "server.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from server.__main__ import main
main()
"""

HUNG_UP = """
import os, signal, sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a server that was started to survive it, by nohup, does

class HangUp:
    def find_spec(self, name, path, target=None):
        if name == "server.serve":
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, HangUp())
sys.argv = ["twostep", "serve", *sys.argv[1:]]
from server.__main__ import main
sys.exit(main())
"""

FIRST_REQUEST = """
import sys
from tests.server.live_server import live_server

with live_server() as server:
    server.client.get("/health")
    before = set(sys.modules)
    server.complete("Hi", stream=True, max_tokens=2).raise_for_status()
    print("imported:", sorted(set(sys.modules) - before))
"""

FINISHED = """
import atexit, signal, sys

atexit.register(lambda: print(signal.getsignal(signal.SIGINT).__name__))
sys.argv = ["twostep"]
from server.__main__ import main
main()
"""


def test_an_interrupted_import_says_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


def test_what_follows_may_catch_an_interrupt() -> None:
    result = subprocess.run([sys.executable, "-c", FINISHED], capture_output=True, text=True)
    assert result.stdout == "default_int_handler\n"


def test_a_first_stream_imports_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", FIRST_REQUEST], capture_output=True, text=True)
    assert "imported: []" in result.stdout.splitlines(), result.stdout + result.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["--api-keys-file", "keys.yaml"], 0), ([], -signal.SIGHUP)])
def test_a_hang_up_before_the_keys_are_read_ends_no_server_that_reads_them_on_it(
    arguments: list[str], code: int
) -> None:
    assert subprocess.run([sys.executable, "-c", HUNG_UP, *arguments], capture_output=True).returncode == code


def test_it_goes_on_if_nobody_can_hear_what_it_says() -> None:
    command = [sys.executable, str(Path(__file__).parent / "fake_program.py"), "broken"]
    with open("/dev/full", "wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "standard output cannot be written: No space left on device" in result.stderr
    assert result.stderr.endswith("INFO twostep.server: stopped\n")
    assert result.returncode == 1  # of what is broken; Python's own for an output that cannot be flushed is 120
