"""Entry point of the command `twostep`, and of `python -m twostep`."""

import signal
import sys


def main() -> int:
    """Runs the command line and returns the exit code. During imports Ctrl-C ends the process at once: a traceback
    would only show which import it was in."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from twostep.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
