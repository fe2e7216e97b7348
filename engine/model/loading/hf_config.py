"""The configuration of the model to serve, read from a checkpoint or refused with a clear reason."""

import logging
from dataclasses import dataclass

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from engine.checkpoint.config_numbers import check_numbers
from engine.checkpoint.local import check_model_type, folder_of, is_local, read_config
from engine.checkpoint.published.scheme import check_scheme
from engine.core.config import EngineConfig
from engine.core.errors import UnsupportedModelError
from engine.model.known.text_models import register_language_model
from engine.model.plain_type import as_plain_type
from engine.model.text_part import TEXT_PART_NAMES, has_text_part, text_part_of
from engine.model.written_dtype import dtype_override

__all__ = ["ServedConfig", "read_hf_config"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedConfig:
    """The configuration of the model to serve, which may be a part of the checkpoint."""

    hf_config: PreTrainedConfig
    tensor_names: dict[str, str] | None
    """What tensors of the checkpoint are called in the model, as patterns; None if as in the checkpoint."""


def read_hf_config(config: EngineConfig) -> ServedConfig:
    """Reads the configuration of `config.model`. Raises ModelError or UnsupportedModelError."""
    if is_local(config.model):
        check_model_type(read_config(folder_of(config.model)), config.model, config.trust_remote_code)
    path = str(folder_of(config.model)) if is_local(config.model) else config.model
    hf_config = AutoConfig.from_pretrained(
        path,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        **dtype_override(config.model, config.revision),
    )
    check_scheme(values := hf_config.to_dict(), config.model)
    check_numbers(values, config.model)
    _forget_scheme(hf_config)
    names = TEXT_PART_NAMES if has_text_part(hf_config) else None
    if names:
        logger.info("%s: of this multimodal checkpoint, the text model is served", config.model)
        hf_config = as_plain_type(text_part_of(hf_config))
    register_language_model(hf_config, TEXT_PART_NAMES)
    _check_architecture(config, hf_config)
    return ServedConfig(hf_config, names)


def _forget_scheme(hf_config: PreTrainedConfig) -> None:
    """Keeps transformers from replacing modules for weights that it shall not read."""
    for part in (hf_config, hf_config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            vars(part).pop(name, None)


def _check_architecture(config: EngineConfig, hf_config: PreTrainedConfig) -> None:
    kind = hf_config.model_type
    if hf_config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; only decoder-only models can be served.")
    remote = config.trust_remote_code and hasattr(hf_config, "auto_map")
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            raise UnsupportedModelError(
                f"{kind} is a multimodal model whose text part is no model of its own to transformers, so it cannot be "
                "served; docs/models.md lists multimodal types of which it can."
            )
        raise UnsupportedModelError(f"{kind} is not a causal language model known to transformers.")
