"""`twostep`, which is `python -m server`, too."""

import signal
import sys


def main() -> int:
    """The process's exit code. While it imports, Ctrl-C ends it at once: nobody could say more than where it was."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from server.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
