"""The Hugging Face hub, before a library is imported that asks it."""

import logging
import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

logger = logging.getLogger(__name__)


def look_for_hub(model: str) -> None:
    """Log that the hub is asked for the model, which is no directory here.

    Where its name is not known, libraries are told to take what was downloaded before: they would ask again and again,
    for half a minute. They read that once, when they are imported, and so do later processes.
    """
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    logger.info("there is no directory %s: asking %s", model, host)
    if "HF_HUB_OFFLINE" in os.environ or getproxies():
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        logger.warning("%s cannot be found (%s): only what was downloaded before can be served", host, error.strerror)
        os.environ["HF_HUB_OFFLINE"] = "1"
