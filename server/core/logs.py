"""Log lines go to stderr: this program's own from the chosen level up, its libraries' from warning up."""

import logging
import os
import sys

_LIBRARIES = ("asyncio", "filelock", "httpcore", "httpx", "huggingface_hub", "sse_starlette", "urllib3", "uvicorn")


def configure_logging(level: str) -> None:
    """Called once, by the program's entry; an app that is embedded elsewhere leaves logging to its host.

    The root's level is also the engine process's.
    """
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own: all would be told twice
    if not sys.stderr.isatty():  # read when that library is imported, here and in the engine process
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
