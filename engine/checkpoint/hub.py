"""Files of models on the Hugging Face hub, and whether the hub can be found."""

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from engine.checkpoint.local import folder_of, is_local
from engine.core.errors import ModelError, reason_of

logger = logging.getLogger(__name__)


def look_for_hub(model: str) -> None:
    """Logs that the hub is asked for the model, which is no directory here. Call before huggingface_hub is imported.

    If the hub's host name cannot be resolved, HF_HUB_OFFLINE is set, so that libraries use what was downloaded before:
    they would retry for half a minute. They read the variable once, when imported; child processes inherit it.
    """
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    logger.info("there is no directory %s: asking %s", model, host)
    if "HF_HUB_OFFLINE" in os.environ or getproxies():
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        logger.warning("%s cannot be found (%s): only what was downloaded before can be used", host, error.strerror)
        os.environ["HF_HUB_OFFLINE"] = "1"


def snapshot(model: str, revision: str | None, files: Sequence[str]) -> Path:
    """Returns the directory, named by the commit, with those of the files that exist. Raises ModelError."""
    import huggingface_hub.errors

    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{model} is not a directory, and the hub cannot be reached to ask for a model of that name: "
            "give a directory, or go online."
        ) from error
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = reason_of(error) or type(error).__name__
        raise ModelError(f"{model} is neither a directory nor a model that the hub can give: {reason}") from error


def optional_file(model: str, revision: str | None, name: str) -> Path | None:
    """Returns the path of a file that a checkpoint need not have. None if it has none, or (logged) if the hub is
    offline by HF_HUB_OFFLINE and the file was not downloaded.

    Raises ModelError if the hub cannot be asked whether there is one.
    """
    if is_local(model):
        path = folder_of(model) / name
        return path if path.is_file() else None
    import huggingface_hub.errors

    try:
        return Path(huggingface_hub.hf_hub_download(model, name, revision=revision))
    except huggingface_hub.errors.LocalEntryNotFoundError as error:  # derived from EntryNotFoundError, but no answer
        if _is_known_missing(model, revision, name):
            return None
        if huggingface_hub.is_offline_mode():
            logger.warning("HF_HUB_OFFLINE: %s of %s was not downloaded, so what it may say is not known", name, model)
            return None
        raise _not_fetched(model, name, error) from error
    except huggingface_hub.errors.EntryNotFoundError:
        return None
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise _not_fetched(model, name, error) from error


def _is_known_missing(model: str, revision: str | None, name: str) -> bool:
    """Whether an earlier answer of the hub, that there is no such file, is cached."""
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(model, name, revision=revision)
    return found is huggingface_hub._CACHED_NO_EXIST


def _not_fetched(model: str, name: str, error: Exception) -> ModelError:
    reason = reason_of(error) or type(error).__name__
    return ModelError(f"{name} of {model} cannot be fetched; try again, or do without it by HF_HUB_OFFLINE=1: {reason}")
