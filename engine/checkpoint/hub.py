"""The Hugging Face hub: told of before a library is imported that asks it, then asked for a commit's files."""

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import msgspec

from engine.checkpoint.local import is_local
from engine.core.config import EngineConfig
from engine.core.errors import ModelError, reason_of

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


def pinned(config: EngineConfig) -> EngineConfig:
    """With the commit that the revision of a hub id names now: a branch may move before all is loaded, or before it is
    loaded again. Raises ModelError."""
    if is_local(config.model):
        return config
    commit = snapshot(config.model, config.revision, ["config.json"]).name
    logger.info("serving commit %s of %s", commit, config.model)
    return msgspec.structs.replace(config, revision=commit)


def snapshot(model: str, revision: str | None, files: Sequence[str]) -> Path:
    """The directory of the commit, which is its name, with such files as there are. Raises ModelError."""
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
    """A file that a checkpoint need not have. None if it has none, or, which is logged, if nobody may be asked.

    Raises ModelError where the hub does not say whether there is one.
    """
    if is_local(model):
        path = Path(model) / name
        return path if path.is_file() else None
    import huggingface_hub.errors

    try:
        return Path(huggingface_hub.hf_hub_download(model, name, revision=revision))
    except huggingface_hub.errors.LocalEntryNotFoundError as error:  # derived from EntryNotFoundError, but no answer
        if _had_none(model, revision, name):
            return None
        if huggingface_hub.is_offline_mode():
            logger.warning("HF_HUB_OFFLINE: %s of %s was not downloaded, so what it may say is not known", name, model)
            return None
        raise _not_fetched(model, name, error) from error
    except huggingface_hub.errors.EntryNotFoundError:
        return None
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise _not_fetched(model, name, error) from error


def _had_none(model: str, revision: str | None, name: str) -> bool:
    """Whether the hub said so when it was asked before."""
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(model, name, revision=revision)
    return found is huggingface_hub._CACHED_NO_EXIST


def _not_fetched(model: str, name: str, error: Exception) -> ModelError:
    reason = reason_of(error) or type(error).__name__
    return ModelError(f"{name} of {model} cannot be fetched; try again, or do without it by HF_HUB_OFFLINE=1: {reason}")
