"""Tiny models to fuse: which parts of each are fused, and runs that record their logits and attention calls."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from engine.attention import registry
from engine.attention.registry import AttentionCall, attention_handler
from engine.model.fusion import fuse_modules
from engine.model.kernel_layer import move_layers_to_kernels
from engine.model.probe import probe_layers
from engine.model.recurrent.kernel_parallel_layer import move_parallel_layers_to_kernels
from engine.model.recurrent.kernel_part_layer import move_part_layers_to_kernels
from tests.engine.tiny_models import make_config

LAYERS = 3
# the fused parts of each model and their number per layer
PARTS = {
    "llama": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "qwen2": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "qwen3": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "mistral": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "qwen3_moe": {"FusedAttention": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "mixtral": {"FusedAttention": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "smollm3_nope": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "phi3_partial": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "seed_oss": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "granite": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "glm": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "glm4": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "ernie4_5": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "olmo2": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "olmo3": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "exaone4": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "cohere2": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 1},
    "starcoder2": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 2},
    "gemma2": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "gemma3": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 6},
    "gpt_oss": {"FusedAttention": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "gemma1": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "ministral": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "cohere": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 1},
    "olmoe": {"FusedAttention": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "hunyuan": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "hunyuan_moe": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "ernie4_5_moe": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "glm4_moe": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "ministral3": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "nemotron": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 2},
    "arcee": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "granitemoeshared": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "gemma4": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 7},
    "gemma4_moe": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 11},
    "phimoe": {"FusedAttention": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 2},
    "gpt_neox": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 2},
    "gpt_neox_serial": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 2},
    "phi_normed": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 3},
    "persimmon": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 4},
    "stablelm": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 2},
    "stablelm_parallel": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 3},
    "cohere_normed": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedLayerNorm": 3},
    "granite_swa": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "granitemoe_swa": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "afmoe": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 6},
    "gpt2": {},
}


class PlainAttention:
    """An attention handler: dense causal attention that records its calls."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        query, key, value = (part.float().transpose(0, 1) for part in (call.query, call.key, call.value))
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=call.params.scaling, enable_gqa=True
        )
        return attended.transpose(0, 1).to(call.query.dtype).contiguous()


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    registry.register()
    torch.manual_seed(5)
    settings = {"attn_implementation": registry.ATTENTION_NAME, "dtype": dtype}
    model = transformers.AutoModelForCausalLM.from_config(make_config(name), **settings).eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    set_biases(model)
    return model


def set_biases(model: nn.Module) -> None:
    """Gives biases of the choice of experts, which are zero at first, other numbers."""
    for name, buffer in model.named_buffers():
        if "expert_bias" in name:
            nn.init.normal_(buffer, std=0.2)


def fuse(model: Any) -> None:
    fuse_modules(model, probe_layers(model, torch.device("cpu")))


def move_to_kernels(model: Any) -> None:
    """Moves layers of every form, whose linear layers are packed."""
    move_layers_to_kernels(model)
    move_part_layers_to_kernels(model)
    move_parallel_layers_to_kernels(model)


def run(model: Any) -> tuple[Tensor, list[AttentionCall]]:
    handler = PlainAttention()
    ids = (torch.arange(23) * 7 % 190)[None]
    with torch.inference_mode(), attention_handler(handler):
        logits = model(ids, position_ids=torch.arange(23)[None], use_cache=False).logits
    return logits, handler.calls


def constants(call: AttentionCall) -> tuple[object, ...]:
    """What a call has beside its tensors, with sinks as plain numbers."""
    sinks = call.params.sinks
    return (*call[3:4], *call.params[:3], None if sinks is None else sinks.tolist(), *call[5:])
