"""The program over an engine without a model: `python fake_program.py loading|ready|slow|stuck|broken [KEYS_FILE]`."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from server.core.logs import configure_logging
from server.serve import serve
from server.settings.settings import Settings
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import FakeBackend

KINDS: dict[str, Callable[[], FakeBackend]] = {
    "loading": lambda: FakeBackend(is_loading=True),
    "ready": FakeBackend,
    "slow": lambda: FakeBackend(FakeEngine(delay_s=0.05)),
    "stuck": lambda: FakeBackend(FakeEngine(hold_at=3)),
    "broken": lambda: FakeBackend(failure=ZeroDivisionError("oops")),
}

if __name__ == "__main__":
    configure_logging("info")
    settings = Settings(port=0, shutdown_timeout=1000, api_keys_file=sys.argv[2] if len(sys.argv) > 2 else None)
    with asyncio.Runner() as runner:
        sys.exit(serve(settings, KINDS[sys.argv[1]]().opener(settings), runner))
