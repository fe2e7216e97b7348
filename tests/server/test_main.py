"""The program before anything is imported."""

import signal
import subprocess
import sys

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


@pytest.mark.parametrize(("arguments", "code"), [(["--api-keys-file", "keys.yaml"], 0), ([], -signal.SIGHUP)])
def test_a_hang_up_before_the_keys_are_read_ends_no_server_that_reads_them_on_it(
    arguments: list[str], code: int
) -> None:
    assert subprocess.run([sys.executable, "-c", HUNG_UP, *arguments], capture_output=True).returncode == code
