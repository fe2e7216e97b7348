"""Models whose parts are fused compute what they computed before."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, ReLUSquaredActivation
from transformers.models.mamba.modeling_mamba import MambaRMSNorm

from engine.core.errors import UnsupportedModelError
from engine.model.fused_modules import FusedMLP, FusedRMSNorm
from engine.model.fusion import fuse_modules, fuse_norms
from engine.model.probe import check_same, probe_layers
from engine.weights.linear import prepare_linears
from tests.crossed import crossed
from tests.engine.model.fused_models import LAYERS, PARTS, constants, fuse, model_of, run

pytestmark = pytest.mark.usefixtures("one_thread", "ops")


@pytest.mark.parametrize("name", PARTS)
def test_what_is_known_of_a_model_is_fused(name: str) -> None:
    model = model_of(name)
    fuse(model)
    fused = Counter(type(module).__name__ for module in model.modules() if type(module).__name__.startswith("Fused"))
    per_layer = {part: LAYERS * count for part, count in PARTS[name].items()}
    for norm in {"FusedLayerNorm", "FusedRMSNorm"} & per_layer.keys():
        per_layer[norm] += 1  # after the last layer
    assert fused == per_layer


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    crossed([name for name in PARTS if PARTS[name]], (torch.float32, torch.bfloat16), ("none", "int8")),
)
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


@pytest.mark.parametrize("name", ["llama", "qwen3", "cohere2", "starcoder2"])
def test_fused_norms_are_close_to_the_plain_ones(name: str) -> None:
    fused = model_of(name)
    plain = copy.deepcopy(fused)
    fuse_norms(fused)
    torch.testing.assert_close(run(fused)[0], run(plain)[0])


def test_a_norm_of_rows_that_are_kept_in_float32_is_theirs() -> None:
    plain = MambaRMSNorm(64).bfloat16()
    nn.init.normal_(plain.weight)
    rows = torch.randn(3, 64)
    norm = FusedRMSNorm(plain.weight, plain.variance_epsilon)(rows)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm, plain(rows))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss", "olmo2", "cohere2", "starcoder2"])
def test_fused_norms_round_where_the_plain_ones_do(name: str) -> None:
    """Sums in another order change the rounding of a few numbers, and rounding elsewhere that of many."""
    model = model_of(name, torch.bfloat16)
    plain = copy.deepcopy(model.model.norm)
    fuse_norms(model)
    x = torch.randn(200, plain.weight.numel()).bfloat16()
    with torch.inference_mode():
        assert (model.model.norm(x) != plain(x)).float().mean() < 0.01


def test_merged_layers_keep_one_copy_of_their_weights() -> None:
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
    calls = probe_layers(model, torch.device("cpu"))
    changed = change(model)
    fuse_modules(model, calls)
    assert changed in model.modules()


def drop_what_attention_adds(model: Any) -> nn.Module:
    layer: nn.Module = model.model.layers[1]
    layer.resid_attn_dropout.train()
    return layer


def drop_what_attention_returns(model: Any) -> nn.Module:
    attention: nn.Module = model.model.layers[1].self_attn
    attention.training = True
    return attention


def drop_what_the_mlp_returns(model: Any) -> nn.Module:
    mlp: nn.Module = model.model.layers[1].mlp
    mlp.training = True
    return mlp


def norm_single_heads(model: Any) -> nn.Module:
    attention: nn.Module = model.model.layers[1].self_attn
    attention.q_norm.weight = nn.Parameter(attention.q_norm.weight[:8], requires_grad=False)
    attention.k_norm.weight = nn.Parameter(attention.k_norm.weight[:8], requires_grad=False)
    return attention


def rotate_another_way(model: Any) -> nn.Module:
    attention: nn.Module = model.model.layers[1].self_attn
    forward = inspect.unwrap(type(attention).forward)
    names = {**forward.__globals__, "apply_rotary_pos_emb": lambda query, key, *_: (query, key)}
    other = FunctionType(forward.__code__, names, "forward", forward.__defaults__)
    attention.__class__ = type("Other", (type(attention),), {"forward": other})
    return attention


def bound_queries(model: Any) -> nn.Module:
    model.config.clip_qkv = 3.0
    attention: nn.Module = model.model.layers[1].self_attn
    return attention


def norm_heads_in_two_ways(model: Any) -> nn.Module:
    attention: nn.Module = model.model.layers[1].self_attn
    attention.k_norm.variance_epsilon = 0.5
    return attention


def norm_too_many_heads(model: Any) -> nn.Module:
    attention: nn.Module = model.model.layers[1].self_attn
    attention.k_layernorm.norms.append(attention.k_layernorm.norms[0])
    return attention


def norm_one_head_with_a_bias(model: Any) -> nn.Module:
    attention: nn.Module = model.model.layers[1].self_attn
    attention.q_layernorm.norms[1].bias = nn.Parameter(torch.ones(8))
    return attention


def split_heads_in_another_way(model: Any) -> nn.Module:
    attention: nn.Module = model.model.layers[1].self_attn
    other = {"_split_heads": lambda self, rows: rows, "forward": type(attention).forward}
    attention.__class__ = type("Other", (type(attention),), other)
    return attention


def drop_what_layers_add(model: Any) -> nn.Module:
    layer: nn.Module = model.gpt_neox.layers[1]
    layer.post_mlp_dropout.train()
    return layer


def gate_by_gelu_new(model: Any) -> nn.Module:
    mlp: nn.Module = model.model.layers[1].mlp
    mlp.act_fn = NewGELUActivation()
    return mlp


def activate_by_a_formula(model: Any) -> nn.Module:
    mlp: nn.Module = model.gpt_neox.layers[1].mlp
    mlp.act = GELUActivation(use_gelu_python=True)
    return mlp


def square_the_gate(model: Any) -> nn.Module:
    mlp: nn.Module = model.model.layers[1].mlp
    mlp.act_fn = ReLUSquaredActivation()
    return mlp


def gate_the_input_by_silu(model: Any) -> nn.Module:
    layer: nn.Module = model.model.layers[1]
    layer.act_fn = nn.SiLU()
    return layer


STAYING: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "a layer that drops": ("phi3", drop_what_attention_adds),
    "an attention that drops": ("seed_oss", drop_what_attention_returns),
    "a gated MLP that drops": ("seed_oss", drop_what_the_mlp_returns),
    "an MLP that drops": ("starcoder2", drop_what_the_mlp_returns),
    "norms of another size": ("olmo2", norm_single_heads),
    "another rotation": ("glm4", rotate_another_way),
    "a gate that is squared": ("llama", square_the_gate),
    "bounds of queries": ("olmoe", bound_queries),
    "an input that is gated in another way": ("gemma4_e", gate_the_input_by_silu),
    "layer norms of heads of two kinds": ("cohere_normed", norm_heads_in_two_ways),
    "norms of more heads": ("stablelm_parallel", norm_too_many_heads),
    "a bias of one head's norm": ("stablelm_parallel", norm_one_head_with_a_bias),
    "heads in another order": ("persimmon", split_heads_in_another_way),
    "a layer that drops what its MLP adds": ("gpt_neox", drop_what_layers_add),
    "a gate by another gelu": ("llama", gate_by_gelu_new),
    "a gelu in Python": ("gpt_neox", activate_by_a_formula),
}


@pytest.mark.parametrize(("name", "change"), STAYING.values(), ids=STAYING)
def test_what_is_not_quite_as_known_of_a_family_stays(name: str, change: Callable[[Any], nn.Module]) -> None:
    model = model_of(name)
    calls = probe_layers(model, torch.device("cpu"))
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
    calls = probe_layers(model, torch.device("cpu"))
    check_same("Llama", calls, calls)
    turned = [*calls[:2], calls[2]._replace(key=-calls[2].key)]
    with pytest.raises(UnsupportedModelError, match="layer 2"):
        check_same("Llama", calls, turned)
    with pytest.raises(UnsupportedModelError, match="layer 0"):
        check_same("Llama", calls, [calls[0]._replace(params=calls[0].params._replace(scaling=2.0)), *calls[1:]])
