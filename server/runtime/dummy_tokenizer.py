"""A tokenizer for models of random weights (--load-format dummy) whose directory has config.json alone."""

import logging
from pathlib import Path

import msgspec

from engine.checkpoint.local import folder_of, is_local, read_config
from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from engine.text.tokenizer_files import has_tokenizer
from server.settings.settings import EMBEDDED_MODEL_DIR

logger = logging.getLogger("twostep.server")


def with_tokenizer(config: EngineConfig) -> EngineConfig:
    """Returns the config, with the embedded model's tokenizer where random weights have none of their own. Raises
    ModelError if it has more tokens than the model."""
    if config.load_format != "dummy" or not is_local(config.model) or has_tokenizer(folder_of(config.model)):
        return config
    embedded = Path(str(EMBEDDED_MODEL_DIR))
    size, needed = _vocab_size(folder_of(config.model)), _vocab_size(embedded) or 0
    if size is not None and size < needed:
        raise ModelError(
            f"There is no tokenizer in {config.model}, whose vocabulary of {size:,} tokens is too small for that of "
            f"the embedded model ({needed:,}): copy a tokenizer.json beside its config.json."
        )
    logger.warning("%s has no tokenizer: the embedded model's stands in for it", config.model)
    return msgspec.structs.replace(config, tokenizer=str(embedded))


def _vocab_size(folder: Path) -> int | None:
    """Returns the number of tokens that config.json names, None if it leaves that to the kind of model."""
    config = read_config(folder)
    text_part = config.get("text_config")
    for fields in (config, text_part if isinstance(text_part, dict) else {}):
        if isinstance(size := fields.get("vocab_size"), int):
            return size
    return None
