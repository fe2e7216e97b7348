"""Which files of the hub are served: those of one commit, or one GGUF file."""

import logging

import msgspec

from engine.checkpoint.hub import snapshot
from engine.checkpoint.hub_gguf import check_has_config, gguf_of, split_tag
from engine.checkpoint.local import check_checkpoint, is_local
from engine.core.config import EngineConfig
from engine.core.errors import ModelError

__all__ = ["pinned", "pinned_settings"]

logger = logging.getLogger(__name__)


def pinned(config: EngineConfig) -> EngineConfig:
    """Returns the config with the revision of a hub id replaced by the commit that it names now: a branch may move
    before all files are loaded, or before they are loaded again. Ids of GGUF files are replaced by the files, which are
    downloaded. Raises ModelError."""
    draft_model, tag = split_tag(config.draft_model or "")
    if tag is not None:
        config = msgspec.structs.replace(config, draft_model=str(gguf_of(draft_model, tag, None)))
    if is_local(config.model):
        return config
    model, tag = split_tag(config.model)
    if tag is not None:
        path = gguf_of(model, tag, config.revision)
        logger.info("serving %s of %s", path.name, model)
        return msgspec.structs.replace(config, model=str(path), revision=None)
    folder = snapshot(config.model, config.revision, ["config.json"])
    check_has_config(config.model, config.revision, folder)
    logger.info("serving commit %s of %s", folder.name, config.model)
    return msgspec.structs.replace(config, revision=folder.name)


def pinned_settings(model: str, revision: str | None) -> EngineConfig:
    """Returns, pinned, what names a model whose config.json says that it can be served. Weights are not fetched. Raises
    ModelError, also for a GGUF file on the hub, whose settings are in it."""
    check_checkpoint(model)
    if split_tag(model)[1] is not None:
        raise ModelError(f"{model} is a file on the hub: get it with twostep pull {model}, and name its path.")
    return pinned(EngineConfig(model=model, revision=revision))
