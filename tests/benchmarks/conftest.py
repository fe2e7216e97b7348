import pytest

from benchmarks.peers import comparison


@pytest.fixture(autouse=True)
def _quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the check whether the machine is idle."""
    monkeypatch.setattr(comparison, "_IDLE_CHECK_S", 0.01)
