"""Whether a checkpoint's files can hold the weights that its config.json describes.

transformers makes all weights that lack, or have another shape, before it tells: terabytes for one digit too many.
"""

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.attention.registry import ATTENTION_NAME
from engine.checkpoint.local import folder_of, read_config
from engine.checkpoint.published.scheme import scheme_of
from engine.checkpoint.weight_files import bytes_of_weights
from engine.core.config import EngineConfig
from engine.core.errors import ModelError

__all__ = ["check_weight_count"]

_MAX_PER_BYTE = 2
"""Weights of plain numbers take two bytes or one."""
_MAX_QUANTIZED_PER_BYTE = 8


def check_weight_count(config: EngineConfig, hf_config: PreTrainedConfig) -> None:
    """Raises ModelError if config.json of a directory describes more weights than its files can hold. Other
    checkpoints, those without files, and models of a checkpoint's own code, pass."""
    num_bytes = bytes_of_weights(config.model)
    if not num_bytes or type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    counted = copy.deepcopy(hf_config)
    counted.dtype = None  # config.json may name one of 8 bits, which torch makes nothing of by default
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(counted, attn_implementation=ATTENTION_NAME)
    count = sum(parameter.numel() for parameter in module.parameters())
    is_plain = scheme_of(read_config(folder_of(config.model))) is None
    if count > num_bytes * (_MAX_PER_BYTE if is_plain else _MAX_QUANTIZED_PER_BYTE):
        raise ModelError(
            f"The weights of {config.model} do not fit its config.json: it describes {count:,} weights, more than "
            f"{num_bytes:,} bytes can hold."
        )
