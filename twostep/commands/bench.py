"""`twostep bench`: the load test under the command's roof."""

from collections.abc import Sequence

from loadtest.cli import main as run_load_test


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m loadtest` with these arguments."""
    return run_load_test(arguments, program="twostep bench")
