"""What a checkpoint will take, from its configuration alone: a model without weights is made and measured."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.attention.kv_cache import bytes_per_block
from engine.attention.registry import ATTENTION_NAME, register
from engine.checkpoint.pinning import pinned_settings
from engine.core.config import EngineConfig
from engine.core.errors import ModelError, TwostepError, UnsupportedModelError, reason_of
from engine.core.kv_groups import KVGroups
from engine.core.machine import ModelSize
from engine.mixers.functions import route_recurrent_functions
from engine.model.context_limit import context_limit
from engine.model.latent_attention import keep_latents
from engine.model.loading.hf_config import read_hf_config
from engine.model.loading.known_layers import replace_known_layers
from engine.model.probe import layer_shape, probe_layers
from engine.model.small_copy import num_distinct_layers
from engine.model.step_work import size_of
from engine.runner.window_groups import groups_of_layers
from engine.weights.moe import loops_over_experts

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A model's size, as it would be on the CPU."""

    architecture: str
    num_weights: int
    size: ModelSize
    """The size of weights in 16 bits."""
    kv_groups: KVGroups
    kv_block_bytes: int
    """Bytes of keys and values in 16 bits, in a block of one group of layers with the usual number of tokens."""
    max_model_len: int
    num_layers: int
    num_distinct_layers: int
    """How many of the first layers hold one of each kind."""


def estimate(model: str, revision: str | None = None) -> Estimate:
    """Reads config.json of a directory, a GGUF file or a hub id, and no weights; imports transformers' models. Raises
    ModelError for what cannot be served or estimated, and for a GGUF file on the hub, whose settings are in it."""
    config = pinned_settings(model, revision)
    try:
        return _estimate(config)
    except TwostepError:
        raise
    except Exception as error:  # a checkpoint's values reach code all over transformers, which raises anything
        raise ModelError(f"What {model} takes cannot be told from its config.json: {reason_of(error)}") from error


def _estimate(config: EngineConfig) -> Estimate:
    hf_config = read_hf_config(config).hf_config
    device, dtype = torch.device("meta"), torch.bfloat16
    register()
    with device:
        module = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    module.eval()
    route_recurrent_functions(module)
    replace_known_layers(module)
    keep_latents(module, dtype)
    _leave_out_choices(module)
    text_config = hf_config.get_text_config(decoder=True)
    calls = probe_layers(module, device)
    if not calls:
        raise UnsupportedModelError(f"{config.model} has no attention, whose memory and time alone can be told yet.")
    layers, max_model_len = tuple(map(layer_shape, calls)), context_limit(text_config, ())
    groups = groups_of_layers(layers, max_model_len)
    return Estimate(
        architecture=type(module).__name__,
        num_weights=sum(parameter.numel() for parameter in module.parameters()),
        size=size_of(module, calls, dtype),
        kv_groups=groups,
        kv_block_bytes=bytes_per_block(layers, config.block_size, dtype, groups.of_layers),
        max_model_len=max_model_len,
        num_layers=text_config.num_hidden_layers,
        num_distinct_layers=num_distinct_layers(module),
    )


def _leave_out_choices(module: nn.Module) -> None:
    """Has experts give nothing whose code reads which are chosen: that is not known without numbers."""
    for each in module.modules():
        if loops_over_experts(each):
            each.forward = lambda hidden_states, *_: torch.zeros_like(hidden_states)
