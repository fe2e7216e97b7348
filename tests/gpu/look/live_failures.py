"""A plugin of pytest that prints each failure when it happens: a run that is killed has told of those before."""

import sys

import pytest

_MAX_CHARS = 2500


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        text = report.longreprtext[-_MAX_CHARS:]
        print(f"\nFAILED {report.nodeid}\n{text}\n", file=sys.stderr, flush=True)
