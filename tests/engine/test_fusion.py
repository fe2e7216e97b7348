"""Models whose parts were fused compute what they computed before."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from engine import attention_hook, known_code
from engine.attention_hook import AttentionCall, attention_handler
from engine.fusion import fuse_modules, fuse_norms
from engine.kernel_layer import KernelDecoderLayer, move_layers_to_kernels
from engine.kernels import load_kernels
from engine.linear import prepare_linears
from engine.model_probe import probe_layers
from tests.engine.tiny_models import make_config

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 3
# what of a model is fused, per layer and besides
PARTS = {
    "llama": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "qwen2": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "qwen3": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "mistral": {"FusedAttention": 1, "FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "qwen3_moe": {"FusedAttention": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
    "smollm3": {"FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 2},
    "phi3": {"FusedRMSNorm": 2},
    "gemma2": {"FusedMLP": 1},
    "gpt2": {},
}


class PlainAttention:
    """Dense and causal; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        query, key, value = (part.float().transpose(0, 1) for part in (call.query, call.key, call.value))
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=call.scaling, enable_gqa=True
        )
        return attended.transpose(0, 1).to(call.query.dtype)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    attention_hook.register()
    torch.manual_seed(5)
    settings = {"attn_implementation": attention_hook.ATTENTION_NAME, "dtype": dtype}
    model = transformers.AutoModelForCausalLM.from_config(make_config(name), **settings).eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def fuse(model: Any) -> None:
    fuse_modules(model, probe_layers(model, model.config, torch.device("cpu")))


def run(model: Any) -> tuple[Tensor, list[AttentionCall]]:
    handler = PlainAttention()
    ids = (torch.arange(23) * 7 % 190)[None]
    with torch.inference_mode(), attention_handler(handler):
        logits = model(ids, position_ids=torch.arange(23)[None], use_cache=False).logits
    return logits, handler.calls


def constants(call: AttentionCall) -> tuple[object, ...]:
    return call[3:]


@pytest.fixture(autouse=True)
def ops() -> None:
    if load_kernels() is None:
        pytest.skip("no kernels here")
    torch.ops.twostep.replace_activations()


@pytest.mark.parametrize("name", PARTS)
def test_what_is_known_of_a_model_is_fused(name: str) -> None:
    model = model_of(name)
    fuse(model)
    fused = Counter(type(module).__name__ for module in model.modules() if type(module).__name__.startswith("Fused"))
    per_layer = {part: LAYERS * count for part, count in PARTS[name].items()}
    if "FusedRMSNorm" in per_layer:
        per_layer["FusedRMSNorm"] += 1  # after the last layer
    assert fused == per_layer


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in PARTS if PARTS[name]])
def test_fusing_changes_no_bit_but_by_the_order_of_sums_in_norms(
    name: str, dtype: torch.dtype, quantization: str
) -> None:
    fused = model_of(name, dtype)
    plain = copy.deepcopy(fused)
    fuse_norms(plain)
    fuse(fused)
    for model in (plain, fused):
        assert not prepare_linears(model, True, quantization).unconverted
    (expected, plain_calls), (logits, calls) = run(plain), run(fused)
    assert torch.equal(logits, expected)
    assert [constants(call) for call in calls] == [constants(call) for call in plain_calls]
    for call, plain_call in zip(calls, plain_calls, strict=True):
        assert all(map(torch.equal, call[:3], plain_call[:3]))


WHOLLY_FUSED = [name for name, parts in PARTS.items() if len(parts) == 4]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WHOLLY_FUSED)
def test_layers_in_the_kernels_change_no_bit(name: str, dtype: torch.dtype, quantization: str) -> None:
    model = model_of(name, dtype)
    fuse(model)
    prepare_linears(model, True, quantization)
    expected, plain_calls = run(model)
    move_layers_to_kernels(model)
    assert sum(isinstance(module, KernelDecoderLayer) for module in model.modules()) == LAYERS
    logits, calls = run(model)
    assert torch.equal(logits, expected)
    assert [constants(call) for call in calls] == [constants(call) for call in plain_calls]


def test_layers_whose_experts_are_not_known_stay() -> None:
    model = model_of("qwen3_moe")
    fuse(model)
    prepare_linears(model, True)
    move_layers_to_kernels(model)
    assert not any(isinstance(module, KernelDecoderLayer) for module in model.modules())


def test_a_layer_without_kernel_weights_stays() -> None:
    model = model_of("llama")
    fuse(model)
    prepare_linears(model, False)
    move_layers_to_kernels(model)
    assert not any(isinstance(module, KernelDecoderLayer) for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_norms_are_close_to_the_plain_ones(name: str) -> None:
    fused = model_of(name)
    plain = copy.deepcopy(fused)
    fuse_norms(fused)
    torch.testing.assert_close(run(fused)[0], run(plain)[0])


def test_joined_layers_keep_one_copy_of_their_weights() -> None:
    model = model_of("qwen2")
    before = sum(parameter.numel() for parameter in model.parameters())
    fuse(model)
    assert sum(parameter.numel() for parameter in model.parameters()) == before


def test_a_bias_of_some_is_zero_for_the_others() -> None:
    fused = model_of("llama")
    for layer in fused.model.layers:
        layer.self_attn.k_proj.bias = nn.Parameter(torch.randn(layer.self_attn.k_proj.out_features))
    plain = copy.deepcopy(fused)
    fuse_norms(plain)
    fuse(fused)
    torch.testing.assert_close(run(fused)[0], run(plain)[0])


class Doubling(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj + down_proj


def test_a_module_that_computes_something_else_is_not_known() -> None:
    assert known_code.is_gated_mlp(LlamaMLP(make_config("llama")))
    assert not known_code.is_gated_mlp(Doubling(make_config("llama")))


def test_an_attention_that_rotates_in_another_way_is_not_known() -> None:
    config = transformers.HeliumConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    helium = transformers.models.helium.modeling_helium.HeliumAttention(config, 0)
    assert not known_code.is_attention(helium)


def test_a_module_that_is_watched_stays() -> None:
    model = model_of("llama")
    watched = model.model.layers[1].mlp
    watched.register_forward_hook(lambda *_: None)
    fuse(model)
    assert model.model.layers[1].mlp is watched


def test_a_gate_that_is_not_known_stays() -> None:
    model = model_of("llama")
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    plain = model.model.layers[0].mlp
    fuse(model)
    assert model.model.layers[0].mlp is plain
