"""Logging to stderr: this program's records from --log-level up, its libraries' from warning up."""

import logging
import os
import sys

from engine.host.log_format import choose_format, configure_root

_LIBRARIES = ("asyncio", "filelock", "httpcore", "httpx", "huggingface_hub", "sse_starlette", "urllib3", "uvicorn")


def configure_logging(level: str, log_format: str = "text") -> None:
    """Configures logging; called once, by the program's entry. An app that is embedded elsewhere leaves logging to its
    host. The engine process takes over the root logger's level, and the format.
    """
    choose_format(log_format)
    configure_root(level.upper())
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own: each line would come twice
    if not sys.stderr.isatty():  # read when that library is imported, here and in the engine process
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
