"""A module of transformers with the checkpoint's weights, each of which has its place in it, or with random ones."""

import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.attention import registry
from engine.checkpoint.weight_source import stored_weights
from engine.core.config import EngineConfig
from engine.core.errors import ModelError, UnsupportedModelError
from engine.model.dummy_weights import dummy_fingerprint, dummy_model
from engine.model.finite_weights import check_finite
from engine.model.loading.hf_config import ServedConfig
from engine.model.loading.placement import Placement
from engine.model.loading.preparation import made_to_run, only_errors_of
from engine.model.planning.paged_weights import check_packing_fits
from engine.model.weight_count import check_weight_count
from engine.model.weights_fingerprint import weights_fingerprint

__all__ = ["load_module"]

logger = logging.getLogger(__name__)


def load_module(config: EngineConfig, served: ServedConfig, place: Placement) -> tuple[PreTrainedModel, str]:
    """Returns the model with its weights, or random ones, and their fingerprint. Raises ModelError."""
    registry.register()
    if config.load_format == "dummy":
        return _dummy_module(config, served.hf_config, place)
    check_weight_count(config, served.hf_config)
    if place.device.type == "cpu":
        check_packing_fits(config, served.hf_config)
    module = _load_weights(config, served, place)
    check_finite(module, config.model)
    return module, weights_fingerprint(module)


def _dummy_module(config: EngineConfig, hf_config: PreTrainedConfig, place: Placement) -> tuple[PreTrainedModel, str]:
    logger.warning(
        "--load-format dummy: the weights of %s are random numbers, so its answers mean nothing", config.model
    )
    module = dummy_model(hf_config, place.dtype, place.device, config.trust_remote_code)
    return made_to_run(module, place.device), dummy_fingerprint(module, place.device)


def _load_weights(config: EngineConfig, served: ServedConfig, place: Placement) -> PreTrainedModel:
    source: dict[str, Any] = {"config": served.hf_config, "key_mapping": served.tensor_names}
    expander = torch.ops.twostep.expand_blocks if place.has_kernels else None
    weights = stored_weights(config.model, config.revision, place.dtype, expander)
    if weights is None:  # transformers reads them
        kind, path = AutoModelForCausalLM, config.model
        source |= {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    else:
        kind, path = _class_of(served.hf_config), None
        source |= {"state_dict": weights}
    with only_errors_of("transformers.modeling_utils"), only_errors_of("transformers.distributed"):
        module, info = kind.from_pretrained(
            path,
            dtype=place.dtype,
            attn_implementation=registry.ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            **source,
        )
    _check_fit(config.model, module, info)
    return made_to_run(module, place.device, stays_mapped=place.group.size > 1 and place.device.type != "cpu")


def _class_of(hf_config: PreTrainedConfig) -> Any:
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError("Models of a checkpoint's own code cannot be served from quantized weights.")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]


def _check_fit(model: str, module: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raises ModelError unless the checkpoint has each of the model's tensors, and none that would change its results.

    Tensors of whole parts that are not used, such as multi-token prediction or a vision tower, are ignored. An unused
    tensor of a part that is used (a bias, the scales of quantized weights) would be missed in the results.
    """
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"The checkpoint {model} is incomplete: {len(missing)} tensors such as {missing[0]} lack.")
    if mismatched := list(info["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        raise ModelError(
            f"The weights of {model} do not fit its config.json: {name} has the shape {list(shape)}, "
            f"not {list(expected)}."
        )
    used_parts = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    if unused := sorted(name for name in info["unexpected_keys"] if name.rpartition(".")[0] in used_parts):
        raise ModelError(
            f"The weights of {model} do not fit its config.json: {len(unused)} tensors such as {unused[0]} have no "
            "place in the model that it describes, whose results would be others without them."
        )
