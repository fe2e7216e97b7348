import pytest

from benchmarks.peers import comparison


@pytest.fixture(autouse=True)
def _quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the machine is idle is looked at for a shorter time."""
    monkeypatch.setattr(comparison, "_IDLE_CHECK_S", 0.01)
