"""Layers whose attention is over latents move into the kernels and change no bit; others stay as they are."""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from engine.attention import registry
from engine.model.kernel_layer import KernelLatentLayer, move_layers_to_kernels
from engine.model.latent_attention import keep_latents
from engine.weights.linear import prepare_linears
from tests.crossed import crossed
from tests.engine.model.fused_models import LAYERS, PlainAttention, constants, fuse, model_of, run
from tests.engine.tiny_models import COMMON

pytestmark = pytest.mark.usefixtures("one_thread", "ops")

NAMES = ("deepseek_v3", "deepseek_halves", "glm4_moe_lite", "youtu", "minicpm3", "deepseek_v2")


def prepared(model: Any, quantization: str = "none") -> Any:
    """Returns the model with fused parts over latents, and packed."""
    keep_latents(model, torch.float32)
    fuse(model)
    prepare_linears(model, True, quantization)
    return model


def num_moved(model: nn.Module) -> int:
    return sum(isinstance(module, KernelLatentLayer) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"), crossed(NAMES, (torch.float32, torch.bfloat16), ("none", "int8", "int4"))
)
def test_layers_over_latents_in_the_kernels_change_no_bit(name: str, dtype: torch.dtype, quantization: str) -> None:
    model = prepared(model_of(name, dtype), quantization)
    expected, plain_calls = run(model)
    move_layers_to_kernels(model)
    assert num_moved(model) == LAYERS
    logits, calls = run(model)
    assert torch.equal(logits, expected)
    assert [constants(call) for call in calls] == [constants(call) for call in plain_calls]
    for call, plain_call in zip(calls, plain_calls, strict=True):
        assert all(map(torch.equal, call[:3], plain_call[:3]))


ODD: dict[str, Any] = {
    **{"num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 40, "kv_lora_rank": 72},
    **{"qk_nope_head_dim": 21, "qk_rope_head_dim": 38, "v_head_dim": 19, "hidden_size": 80},
}
"""Sizes that end inside vectors and pieces of K, more heads than threads, and a rotation of an odd number of pairs."""


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 300])
def test_sizes_that_end_anywhere_change_no_bit(in_pairs: bool, dtype: torch.dtype, num_tokens: int) -> None:
    registry.register()
    torch.manual_seed(3)
    config = transformers.YoutuConfig(**{**COMMON, **ODD, "rope_interleave": in_pairs, "num_hidden_layers": 1})
    settings = {"attn_implementation": registry.ATTENTION_NAME, "dtype": dtype}
    model = transformers.AutoModelForCausalLM.from_config(config, **settings).eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    prepared(model)
    expected = logits_of(model, num_tokens)
    move_layers_to_kernels(model)
    assert num_moved(model) == 1
    assert torch.equal(logits_of(model, num_tokens), expected)


@torch.inference_mode()
def logits_of(model: Any, num_tokens: int) -> torch.Tensor:
    ids, positions = (torch.arange(num_tokens) * 7 % 190)[None], 5 + torch.arange(num_tokens)[None]
    with registry.attention_handler(PlainAttention()):
        logits: torch.Tensor = model(ids, position_ids=positions, use_cache=False).logits
    return logits


def rotate_another_way(attention: Any) -> None:
    forward = inspect.unwrap(type(attention).forward)
    names = {**forward.__globals__, "apply_rotary_pos_emb_interleave": lambda query, key, *_: (query, key)}
    other = FunctionType(forward.__code__, names, "forward", forward.__defaults__)
    attention.__class__ = type("Other", (type(attention),), {"forward": other, "__module__": forward.__module__})


CHANGES: dict[str, Callable[[Any], object]] = {
    "another rotation": rotate_another_way,
    "a watched attention": lambda attention: attention.register_forward_hook(print),
    "a watched projection": lambda attention: attention.q_b_proj.register_forward_hook(print),
    "a watched norm of latents": lambda attention: attention.kv_a_layernorm.register_forward_hook(print),
    "another norm of queries": lambda attention: setattr(attention, "q_a_layernorm", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_attention_that_is_not_quite_as_known_stays(change: Callable[[Any], object]) -> None:
    model = model_of("youtu")
    change(model.model.layers[1].self_attn)
    prepared(model)
    move_layers_to_kernels(model)
    assert [isinstance(layer, KernelLatentLayer) for layer in model.model.layers] == [True, False, True]


def test_layers_whose_router_chooses_groups_of_experts_by_their_best_stay() -> None:
    model = model_of("deepseek_v2")
    for layer in model.model.layers[1:]:
        layer.mlp.gate.topk_method = "group_limited_greedy"
    prepared(model)
    move_layers_to_kernels(model)
    assert [isinstance(layer, KernelLatentLayer) for layer in model.model.layers] == [True, False, False]


def test_an_attention_over_keys_and_values_of_all_heads_stays() -> None:
    model = model_of("youtu")
    fuse(model)
    prepare_linears(model, True)
    move_layers_to_kernels(model)
    assert num_moved(model) == 0


def test_heads_without_kernel_weights_stay() -> None:
    model = model_of("youtu")
    keep_latents(model, torch.float32)
    fuse(model)
    prepare_linears(model, False)
    move_layers_to_kernels(model)
    assert num_moved(model) == 0
