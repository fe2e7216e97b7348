"""Layers that move into the kernels change no bit, with a matmul that applies the gate; others stay as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.kernel_layer import KernelDecoderLayer, move_layers_to_kernels
from engine.weights.linear import PackedLinear, prepare_linears
from engine.weights.packed_weight import pack_weight
from engine.weights.packing_policy import packing_for
from engine.weights.quantized_weight import KernelQuantizedWeight
from tests.crossed import crossed
from tests.engine.model.fused_models import LAYERS, PARTS, constants, fuse, model_of, run

pytestmark = pytest.mark.usefixtures("one_thread", "ops")

MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss", "phimoe"]
WHOLLY_FUSED = [*(name for name, parts in PARTS.items() if len(parts) == 4), *MIXTURES]


# Code that a router or experts may have in the place of what is known.
OTHER_CODE: dict[str, dict[str, Any]] = {
    "gate": {"forward": lambda self, x: super(type(self), self).forward(x)},
    "experts": {"_apply_gate": lambda self, x: self.act_fn(x.chunk(2, dim=-1)[0])},
}


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"), crossed(WHOLLY_FUSED, (torch.float32, torch.bfloat16), ("none", "int8", "int4"))
)
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


@pytest.mark.parametrize("part", ["gate", "experts"])
def test_layers_whose_router_or_experts_are_not_known_stay(part: str) -> None:
    model = model_of("qwen3_moe")
    fuse(model)
    for layer in model.model.layers:
        other = getattr(layer.mlp, part)
        other.__class__ = type("Other", (type(other),), OTHER_CODE[part])
    prepare_linears(model, True)
    move_layers_to_kernels(model)
    assert not any(isinstance(module, KernelDecoderLayer) for module in model.modules())


@pytest.mark.parametrize("part", ["shared_expert", "shared_expert.act_fn", "shared_expert_gate", "gate"])
def test_layers_of_whose_mixture_a_part_is_watched_stay(part: str) -> None:
    model = model_of("qwen2_moe")
    model.model.layers[0].mlp.get_submodule(part).register_forward_hook(print)
    fuse(model)
    prepare_linears(model, True)
    move_layers_to_kernels(model)
    assert [isinstance(layer, KernelDecoderLayer) for layer in model.model.layers] == [False, True, True]


def test_a_layer_without_kernel_weights_stays() -> None:
    model = model_of("llama")
    fuse(model)
    prepare_linears(model, False)
    move_layers_to_kernels(model)
    assert not any(isinstance(module, KernelDecoderLayer) for module in model.modules())


def test_a_layer_whose_products_take_rows_of_16_bits_stays() -> None:
    model = model_of("llama")
    fuse(model)
    prepare_linears(model, True, "int8")
    for module in model.modules():
        if isinstance(module, PackedLinear):
            weight = torch.ones(module.out_features, module.in_features)
            module.packed = KernelQuantizedWeight(weight, 8, row_bits=16)
    move_layers_to_kernels(model)
    assert not any(isinstance(module, KernelDecoderLayer) for module in model.modules())


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize(("size", "k"), [(40, 32), (48, 300), (1040, 32), (208, 1100), (208, 1700)])
def test_a_matmul_that_applies_the_gate_is_the_matmul_and_then_the_gate(size: int, k: int, bits: int) -> None:
    """Sizes exceed the rows of a pass, a block and a task, a piece of K, and the rows that fit into a cache."""
    torch.manual_seed(2)
    gate_up: Any = packing_for({0: "none", 8: "int8", 4: "int4"}[bits], True).layers(weight_of(2 * size, k))
    down, attention_out = (pack_weight(weight, True) for weight in (weight_of(k, size), torch.zeros(k, 16).bfloat16()))
    ones = torch.ones(k, dtype=torch.bfloat16)
    norm = torch.classes.twostep.Norm(ones, 1e-6, False, None)
    mlp = torch.classes.twostep.Mlp(bound(gate_up), bound(down), "silu", True, [])
    after = torch.classes.twostep.AfterAttention(
        bound(attention_out), norm, mlp, None, None, None, None, False, False, None
    )
    for num_rows in (1, 17, 33, 300, 700):
        x = torch.randn(1, num_rows, k).bfloat16()
        normed = torch.ops.twostep.rms_norm(x, ones, 1e-6)[0]
        gated = torch.ops.twostep.gate(gate_up.multiply(normed, None), "silu")
        out = after.run(x, torch.zeros(num_rows, 1, 16).bfloat16(), None, None)
        assert torch.equal(out[0], x[0] + down.multiply(gated, None))


def weight_of(n: int, k: int) -> Tensor:
    return (torch.randn(n, k) / k**0.5).bfloat16()


def bound(packed: Any) -> Any:
    """Returns a packed weight as the C++ operators take it."""
    return torch.classes.twostep.Linear(packed.packed, None, packed.shape[0], packed.bits, None, None, None)
