"""Models whose parts were fused compute what they computed before."""

import copy
import functools
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.activations import GELUTanh
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from engine import attention_hook, known_code
from engine.attention_hook import AttentionCall, attention_handler
from engine.errors import UnsupportedModelError
from engine.fused_modules import FusedMLP
from engine.fusion import fuse_modules, fuse_norms
from engine.kernel_layer import KernelDecoderLayer, move_layers_to_kernels
from engine.kernels import load_kernels
from engine.linear import prepare_linears
from engine.model_probe import check_same, probe_layers
from engine.packed_weight import pack_weight
from engine.packing import packing_for
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


class Wrapped(LlamaMLP):
    @functools.wraps(LlamaMLP.forward)
    def forward(self, *args: Any) -> Tensor:
        return 2 * LlamaMLP.forward(self, *args)


class Called(LlamaMLP):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


@pytest.mark.parametrize("kind", [Doubling, Wrapped, Called])
def test_a_class_that_computes_something_else_is_not_known(kind: type[LlamaMLP]) -> None:
    assert known_code.is_gated_mlp(LlamaMLP(make_config("llama")))
    assert not known_code.is_gated_mlp(kind(make_config("llama")))


def test_a_module_whose_forward_was_replaced_is_not_known() -> None:
    mlp = LlamaMLP(make_config("llama"))
    mlp.forward = lambda x: x
    assert not known_code.is_gated_mlp(mlp)


def in_its_own_words(function: FunctionType, *defaults: object, **names: object) -> FunctionType:
    """A copy with other defaults, and with others under the names that it looks up."""
    return FunctionType(function.__code__, {**function.__globals__, **names}, "copy", defaults or None)


def attention_that_rotates_by(rotate: FunctionType) -> nn.Module:
    class Attention(LlamaAttention):
        forward = in_its_own_words(LlamaAttention.forward, None, None, None, apply_rotary_pos_emb=rotate)

    return Attention(make_config("llama"), 0)


def test_an_attention_that_rotates_in_another_way_is_not_known() -> None:
    rotate = modeling_llama.apply_rotary_pos_emb
    turned = in_its_own_words(rotate, 1, rotate_half=lambda x: x)
    assert known_code.is_attention(attention_that_rotates_by(in_its_own_words(rotate, 1)))
    assert not known_code.is_attention(attention_that_rotates_by(in_its_own_words(rotate, 2)))
    assert not known_code.is_attention(attention_that_rotates_by(turned))
    config = transformers.HeliumConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    assert not known_code.is_attention(transformers.models.helium.modeling_helium.HeliumAttention(config, 0))


ROTATE_HALF = """
import torch
def rotate_half(x):
    "In other words."
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""


def is_rotate_half(source: str) -> bool:
    names: dict[str, Any] = {}
    exec(source, names)
    return known_code._is_same(names["rotate_half"], modeling_llama.rotate_half)


def test_documentation_makes_no_difference() -> None:
    assert is_rotate_half(ROTATE_HALF)
    assert is_rotate_half(ROTATE_HALF.replace('"In other words."', ""))


def test_constants_make_a_difference() -> None:
    assert not is_rotate_half(ROTATE_HALF.replace("dim=-1", "dim=-2"))
    assert not is_rotate_half(ROTATE_HALF.replace('"In other words."', "...").replace("x.shape[-1] // 2 :", "2 :"))


def watch(model: Any) -> nn.Module:
    watched: nn.Module = model.model.layers[1].mlp
    watched.register_forward_hook(lambda *_: None)
    return watched


def gate_by_relu(model: Any) -> nn.Module:
    mlp: nn.Module = model.model.layers[1].mlp
    mlp.act_fn = nn.ReLU()
    return mlp


def gate_by_a_formula(model: Any) -> nn.Module:
    mlp: nn.Module = model.model.layers[1].mlp
    mlp.act_fn = GELUTanh(use_gelu_tanh_python=True)
    return mlp


def norm_in_float64(model: Any) -> nn.Module:
    norm: nn.Module = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(norm.weight.double(), requires_grad=False)
    return norm


def count_anew(model: Any) -> nn.Module:
    attention: nn.Module = model.model.layers[1].self_attn
    attention.layer_idx = 99
    return attention


@pytest.mark.parametrize("change", [watch, gate_by_relu, gate_by_a_formula, norm_in_float64, count_anew])
def test_what_is_not_quite_as_known_stays(change: Callable[[Any], nn.Module]) -> None:
    model = model_of("llama")
    calls = probe_layers(model, model.config, torch.device("cpu"))
    changed = change(model)
    fuse_modules(model, calls)
    assert changed in model.modules()


def test_a_module_that_two_layers_share_is_fused_once() -> None:
    model = model_of("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    fuse(model)
    assert isinstance(model.model.layers[0].mlp, FusedMLP)
    assert model.model.layers[1].mlp is model.model.layers[0].mlp


def test_heads_with_norms_of_two_kinds_stay() -> None:
    model = model_of("qwen3")
    attention = model.model.layers[1].self_attn
    attention.k_norm.variance_epsilon = 0.5
    fuse(model)
    assert model.model.layers[1].self_attn is attention


def test_norms_that_the_code_does_not_call_are_not_applied() -> None:
    model = model_of("llama")
    attention = model.model.layers[1].self_attn
    attention.q_norm = attention.k_norm = model.model.layers[1].input_layernorm
    fuse(model)
    assert model.model.layers[1].self_attn.q_norm is None


def test_a_model_that_computes_something_else_when_fused_is_refused() -> None:
    model = model_of("llama")
    calls = probe_layers(model, model.config, torch.device("cpu"))
    check_same("Llama", calls, calls)
    turned = [*calls[:2], calls[2]._replace(key=-calls[2].key)]
    with pytest.raises(UnsupportedModelError, match="layer 2"):
        check_same("Llama", calls, turned)
    with pytest.raises(UnsupportedModelError, match="layer 0"):
        check_same("Llama", calls, [calls[0]._replace(scaling=2.0), *calls[1:]])


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize(("size", "k"), [(40, 32), (48, 300), (1040, 32), (208, 1100)])
def test_a_product_that_gates_itself_is_the_product_gated(size: int, k: int, bits: int) -> None:
    """Of more rows than a pass, a block and a task have, and of more K than a piece."""
    torch.manual_seed(2)
    gate_up: Any = packing_for({0: "none", 8: "int8", 4: "int4"}[bits], True).layers(weight_of(2 * size, k))
    down, attention_out = (pack_weight(weight, True) for weight in (weight_of(k, size), torch.zeros(k, 16).bfloat16()))
    ones = torch.ones(k, dtype=torch.bfloat16)
    norm = torch.classes.twostep.Norm(ones, 1e-6)
    mlp = torch.classes.twostep.MLP(bound(attention_out), norm, bound(gate_up), bound(down), "silu")
    for num_rows in (1, 17, 33, 300, 700):
        x = torch.randn(1, num_rows, k).bfloat16()
        normed = torch.ops.twostep.rms_norm(x, ones, 1e-6)[0]
        gated = torch.ops.twostep.gate(gate_up.multiply(normed, None), "silu")
        out = torch.ops.twostep.after_attention(mlp, x, torch.zeros(num_rows, 1, 16).bfloat16())
        assert torch.equal(out[0], x[0] + down.multiply(gated, None))


def weight_of(n: int, k: int) -> Tensor:
    return (torch.randn(n, k) / k**0.5).bfloat16()


def bound(packed: Any) -> Any:
    """As the kernels take it."""
    return torch.classes.twostep.Linear(packed.packed, None, packed.shape[0], packed.bits)
