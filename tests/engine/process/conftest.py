from collections.abc import Iterator

import pytest


@pytest.fixture
def soon() -> Iterator[None]:
    """Lets restarts that follow others wait for a moment only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.process.restart_policy._FIRST_DELAY_S", 0.02)
        yield
