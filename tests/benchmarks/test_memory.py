"""`benchmarks.memory` measures growth after the server has settled, and fails if its load ends too soon."""

import subprocess
from typing import Any

import pytest

from benchmarks.memory import Sample, growth_mib_per_hour, load


def test_growth_is_that_of_both_processes_after_the_server_has_settled() -> None:
    filling = [Sample(minute, 80.0, 400.0 + 100 * minute, 500.0) for minute in range(5)]
    settled = [Sample(minute, 80.0 + 0.5 * minute, 900.0 + minute, 500.0) for minute in range(5, 11)]
    assert growth_mib_per_hour(filling + settled) == pytest.approx(90)


def test_a_load_that_ended_too_soon_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start: Any = subprocess.Popen
    monkeypatch.setattr("benchmarks.memory.subprocess.Popen", lambda command, **options: start(["true"], **options))
    server: Any = type("Server", (), {"url": "http://127.0.0.1:1"})
    with pytest.raises(SystemExit, match="too soon"), load(server, 1, 1.0):
        start(["sleep", "0.5"]).wait()
