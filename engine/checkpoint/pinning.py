"""Which files of the hub are served: those of one commit, or one GGUF file."""

import logging

import msgspec

from engine.checkpoint.hub import snapshot
from engine.checkpoint.hub_gguf import check_has_config, gguf_of, split_tag
from engine.checkpoint.local import is_local
from engine.core.config import EngineConfig

__all__ = ["pinned"]

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
