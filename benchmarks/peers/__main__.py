"""Entry point of `python -m benchmarks.peers`."""

import sys

from benchmarks.peers.cli import main

if __name__ == "__main__":
    sys.exit(main())
