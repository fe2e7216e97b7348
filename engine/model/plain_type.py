"""Text parts of multimodal models whose type transformers knows no language model of, served as one of a plain type.

Their positions have several axes, one for a text and others for the places of an image. In a text all axes are equal,
and what is left is a rotation like any other: Qwen3-VL computes what Qwen3 does. That it does is not believed: at each
load a small copy of either, with the same random weights, reads the same tokens.
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.core.errors import UnsupportedModelError
from engine.model.known.same_code import class_named
from engine.model.refusals import refused_if_it_fails
from engine.model.small_copy import cut_config, num_distinct_layers, randomize

__all__ = ["as_plain_type"]

NUM_TOKENS = 48
TOLERANCE = 1e-5
"""Share of the largest number by which others may differ. What sums in another order differ by is less."""
_OF_AXES = ("mrope_section", "mrope_interleaved")


class _PlainType(NamedTuple):
    """A type of language models, and what its configuration has to say for it to compute what another type does."""

    name: str
    settings: Mapping[str, Any] = {}
    conversions: str | None = None
    """Type of the whole model, if transformers knows how its tensors are to be changed after reading."""
    text_model: str | None = None
    """Family and class of the text model, if transformers does not make it of its configuration alone."""


_PLAIN_TYPES = {
    "glm_ocr_text": _PlainType("glm4", {"attention_bias": False}),
    "glm4v_moe_text": _PlainType("glm4_moe"),
    "glm4v_text": _PlainType("glm4", {"attention_bias": True}),
    "granite_docling_text": _PlainType("granite"),
    "hunyuan_vl_text": _PlainType("hunyuan_v1_dense"),
    "paddleocr_vl_text": _PlainType("llama", text_model="paddleocr_vl.PaddleOCRTextModel"),
    "qwen2_5_omni_text": _PlainType("qwen2", text_model="qwen2_5_omni.Qwen2_5OmniThinkerTextModel"),
    "qwen2_5_vl_text": _PlainType("qwen2"),
    "qwen2_vl_text": _PlainType("qwen2"),
    "qwen3_omni_moe_text": _PlainType(
        "qwen3_moe", conversions="qwen3_omni_moe", text_model="qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel"
    ),
    "qwen3_vl_moe_text": _PlainType("qwen3_moe", {"norm_topk_prob": True}, "qwen3_vl_moe"),
    "qwen3_vl_text": _PlainType("qwen3"),
}


def as_plain_type(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of a language model that computes what the text model with `config` does: the same one
    unless its type is listed here. Raises UnsupportedModelError if it computes something else."""
    plain_type = _PLAIN_TYPES.get(config.model_type)
    if plain_type is None:
        return config
    plain = _converted(config, plain_type)
    with refused_if_it_fails(f"{config.model_type} cannot be served as {plain_type.name}"):
        is_same = _compute_the_same(config, plain, plain_type.text_model)
    if not is_same:
        raise UnsupportedModelError(
            f"{config.model_type} with these settings computes something else than {plain_type.name}, as which its "
            "text part would be served."
        )
    if plain_type.conversions is not None:
        _read_as(plain_type.conversions, plain_type.name)
    return plain


def _converted(config: PreTrainedConfig, plain_type: _PlainType) -> PreTrainedConfig:
    values = config.to_dict() | plain_type.settings
    rotations = values["rope_parameters"]
    values["rope_parameters"] = {"partial_rotary_factor": 1.0} | {
        name: value for name, value in rotations.items() if name not in _OF_AXES
    }
    values.setdefault("head_dim", config.hidden_size // config.num_attention_heads)
    del values["model_type"]
    return CONFIG_MAPPING[plain_type.name](**values)


def _read_as(whole: str, plain: str) -> None:
    """Lets language models of type `plain` be read from checkpoints of type `whole`, too: they may hold experts with
    rows and columns exchanged, and of each the shape tells."""
    conversions = [each for kind in (plain, whole) for each in get_checkpoint_conversion_mapping(kind) or ()]
    register_checkpoint_conversion_mapping(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[plain], conversions, overwrite=True)


@torch.inference_mode()
def _compute_the_same(config: PreTrainedConfig, plain: PreTrainedConfig, text_model: str | None) -> bool:
    """Whether small models with these configurations and the same weights give the same hidden states."""
    with torch.device("meta"):
        num_layers = num_distinct_layers(AutoModel.from_config(plain))
    one, other = _small_model(config, num_layers, text_model), _small_model(plain, num_layers)
    randomize(one)
    other.load_state_dict(one.state_dict())
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(one.config.vocab_size, (1, NUM_TOKENS), generator=generator)
    expected, computed = (each(input_ids=token_ids, use_cache=False).last_hidden_state for each in (one, other))
    return bool((expected - computed).abs().max() <= TOLERANCE * expected.abs().max())  # NaN is not


def _small_model(config: PreTrainedConfig, num_layers: int, text_model: str | None = None) -> PreTrainedModel:
    config = copy.deepcopy(config)
    cut_config(config, num_layers)
    make = AutoModel.from_config if text_model is None else class_named(text_model)._from_config
    with torch.device("cpu"):
        model: PreTrainedModel = make(config, dtype=torch.float32, attn_implementation="eager")
    return model.eval()
