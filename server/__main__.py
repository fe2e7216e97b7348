"""`python -m server` is the same program as `twostep`."""

import sys

from server.cli import main

if __name__ == "__main__":
    sys.exit(main())
