"""Recurrent layers that are fused compute what transformers' own do, over the same states."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.attention import registry
from engine.mixers.functions import route_recurrent_functions
from engine.mixers.metadata import StateMetadata
from engine.mixers.registry import JointMixer, Mixer, state_handler
from engine.mixers.state import StateShape
from engine.model.adapter_targets import _columns
from engine.model.fused_recurrent import FusedDeltaNet
from engine.model.fusion import _fused_recurrent
from engine.weights.linear import prepare_linears
from tests.engine.model.fused_models import fuse, model_of, move_to_kernels, run, set_biases
from tests.engine.tiny_architectures import tiny_config

pytestmark = pytest.mark.usefixtures("one_thread", "ops")

PARTS = {
    "qwen3_5": {"FusedAttention": 1, "FusedDecoderLayer": 3, "FusedDeltaNet": 2, "FusedMLP": 3, "FusedRMSNorm": 9},
    "lfm2": {"FusedAttention": 1, "FusedDecoderLayer": 3, "FusedShortConvolution": 2, "FusedMLP": 3, "FusedRMSNorm": 9},
    "granite4": {"FusedAttention": 1, "FusedDecoderLayer": 3, "FusedMamba2": 2, "FusedMLP": 3, "FusedRMSNorm": 7},
    "qwen3_5_moe": {"FusedAttention": 1, "FusedDecoderLayer": 3, "FusedDeltaNet": 2, "FusedMLP": 3, "FusedRMSNorm": 9},
    "lfm2_moe": {
        **{"FusedAttention": 1, "FusedDecoderLayer": 3, "FusedShortConvolution": 2, "FusedMLP": 1, "FusedRMSNorm": 9},
    },
}
SHARED_ATTENTION = {"hybrid_layer_ids": [1, 3], "attention_hidden_size": 128, "attention_head_dim": 32}
"""Settings of Zamba 2, in whose hybrid layers an attention comes before Mamba-2."""
FURTHER: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "granitemoehybrid": (  # without experts, and with rotated queries
        {
            "num_local_experts": 0,
            "residual_multiplier": 0.7,
            "position_embedding_type": "rope",
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        {"FusedAttention": 2, "FusedDecoderLayer": 4, "FusedMamba2": 2, "FusedMLP": 4, "FusedRMSNorm": 9},
    ),
    "bamba": (
        {"attn_layer_indices": [1, 3]},
        {"FusedAttention": 2, "FusedDecoderLayer": 4, "FusedMamba2": 2, "FusedMLP": 4, "FusedRMSNorm": 9},
    ),
    "mamba2": ({}, {"FusedMamba2": 4, "FusedRMSNorm": 5}),
    "nemotron_h": (  # one layer of each kind
        {"num_experts_per_tok": 2},
        {"FusedAttention": 1, "FusedMamba2": 1, "FusedMLP": 2, "FusedPartLayer": 4, "FusedRMSNorm": 5},
    ),
    "falcon_h1": (  # with norms of what the scans read
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "key_multiplier": 0.7},
        {"FusedAttention": 4, "FusedMamba2": 4, "FusedMLP": 4, "FusedParallelLayer": 4, "FusedRMSNorm": 9},
    ),
    "zamba2": (  # two of whose layers read what a shared attention adds, too
        {"layers_block_type": ["mamba", "hybrid"] * 2, **SHARED_ATTENTION},
        {"FusedMamba2": 4, "FusedPartLayer": 4, "FusedRMSNorm": 9},
    ),
    "qwen3_next": (
        {},
        {"FusedAttention": 1, "FusedDecoderLayer": 4, "FusedDeltaNet": 3, "FusedMLP": 4, "FusedRMSNorm": 11},
    ),
    "lfm3": (
        {"use_attention_gate": False, "layer_types": ["conv", "full_attention"] * 2},
        {"FusedAttention": 2, "FusedDecoderLayer": 4, "FusedShortConvolution": 2, "FusedMLP": 4, "FusedRMSNorm": 21},
    ),
}
"""Model types that are known, too: their settings, and what is fused of each."""
LAYERS_IN_KERNELS = {
    "qwen3_5": {"KernelRecurrentLayer": 2, "KernelDecoderLayer": 1},
    "qwen3_5_moe": {"KernelRecurrentLayer": 2, "KernelDecoderLayer": 1},
    "qwen3_next": {"KernelRecurrentLayer": 3, "KernelDecoderLayer": 1},
    "lfm2": {"KernelRecurrentLayer": 2, "KernelDecoderLayer": 1},
    "lfm2_moe": {"KernelRecurrentLayer": 2, "KernelDecoderLayer": 1},
    "granite4": {"KernelRecurrentLayer": 2, "KernelDecoderLayer": 1},
    "bamba": {"KernelRecurrentLayer": 2, "KernelDecoderLayer": 2},
    "granitemoehybrid": {"KernelRecurrentLayer": 2, "KernelDecoderLayer": 2},
    "nemotron_h": {"KernelRecurrentPart": 1, "KernelAttentionPart": 1, "KernelFeedForwardPart": 2},
    "falcon_h1": {"KernelParallelLayer": 4},
    "zamba2": {"KernelRecurrentPart": 4},
}
NUM_TOKENS = 23  # of `run`


class ZeroStates:
    """A state handler for one sequence that begins: it records the shapes of its states."""

    def __init__(self) -> None:
        self.shapes: list[StateShape] = []
        self._metadata = StateMetadata([0], [NUM_TOKENS], [True], torch.device("cpu"))

    def advance(self, mixer: Mixer) -> Tensor:
        return mixer.advance(self._zeros(mixer.state_shape), self._metadata)

    def advance_jointly(self, mixer: JointMixer) -> Tensor:
        return mixer.advance(tuple(map(self._zeros, mixer.state_shapes)), self._metadata)

    def _zeros(self, shape: StateShape) -> Tensor:
        self.shapes.append(shape)
        return torch.zeros(1, *shape.sizes, dtype=shape.dtype)


def routed(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = model_of(name, dtype)
    route_recurrent_functions(model)
    return model


def further(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    registry.register()
    torch.manual_seed(5)
    config = tiny_config(model_type, {"vocab_size": 199, **FURTHER[model_type][0], **changes})
    settings = {"attn_implementation": registry.ATTENTION_NAME, "dtype": dtype}
    model = AutoModelForCausalLM.from_config(config, **settings).eval()
    route_recurrent_functions(model.requires_grad_(False))
    set_biases(model)
    return model


def parts(model: Any, prefix: str) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules() if type(module).__name__.startswith(prefix))


def fused_parts(model: Any) -> Counter[str]:
    fuse(model)
    return parts(model, "Fused")


def run_with_states(model: Any) -> tuple[Tensor, list[StateShape]]:
    states = ZeroStates()
    with state_handler(states):
        logits, _ = run(model)
    return logits, states.shapes


@pytest.mark.parametrize("name", PARTS)
def test_what_is_known_of_a_hybrid_is_fused(name: str) -> None:
    assert fused_parts(routed(name)) == PARTS[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARTS)
def test_fused_layers_compute_what_they_replace(name: str, dtype: torch.dtype) -> None:
    fused = routed(name, dtype)
    plain = copy.deepcopy(fused)
    fuse(fused)
    (expected, shapes), (logits, fused_shapes) = run_with_states(plain), run_with_states(fused)
    assert fused_shapes == shapes
    tolerance = 2e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("model_type", FURTHER)
def test_models_of_the_same_layers_are_fused_too(model_type: str) -> None:
    fused = further(model_type)
    plain = copy.deepcopy(fused)
    assert fused_parts(fused) == FURTHER[model_type][1]
    (expected, _), (logits, _) = run_with_states(plain), run_with_states(fused)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_attention_with_gates_of_whole_heads_stays() -> None:
    model = further("lfm3", use_attention_gate=True)
    fuse(model)
    assert parts(model, "FusedAttention") == {} and parts(model, "FusedDecoderLayer") == {"FusedDecoderLayer": 4}


def test_mamba2_that_norms_before_it_gates_stays() -> None:
    model = further("falcon_h1", mamba_norm_before_gate=True)
    fuse(model)
    assert parts(model, "FusedMamba2") == parts(model, "FusedParallelLayer") == {}


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5"])
def test_adapters_find_the_columns_of_each_projection(model_type: str) -> None:
    model = further(model_type) if model_type in FURTHER else routed(model_type)
    net, plain = model.model.layers[0].linear_attn, copy.deepcopy(model.model.layers[0].linear_attn)
    fused = FusedDeltaNet(net)
    x = torch.randn(5, model.config.hidden_size)
    places = _columns(fused.joined, fused.projection_sizes, len(fused.names))
    for name, columns in zip(fused.names, places, strict=True):
        torch.testing.assert_close(fused.in_proj(x)[:, columns], getattr(plain, name)(x))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS_IN_KERNELS)
def test_layers_in_the_kernels_change_no_bit(name: str, dtype: torch.dtype, quantization: str) -> None:
    model = further(name, dtype=dtype) if name in FURTHER else routed(name, dtype)
    fuse(model)
    prepare_linears(model, True, quantization)
    expected, shapes = run_with_states(model)
    move_to_kernels(model)
    assert parts(model, "Kernel") == LAYERS_IN_KERNELS[name]
    logits, kernel_shapes = run_with_states(model)
    assert torch.equal(logits, expected) and kernel_shapes == shapes


def another_activation(net: Any) -> None:
    net.activation = "gelu"


def a_bias_in_the_convolution(net: Any) -> None:
    net.conv1d.bias = nn.Parameter(torch.zeros(net.conv1d.out_channels))


def another_norm(net: Any) -> None:
    net.norm.activation = "relu"


def another_projection(net: Any) -> None:
    net.in_proj_a = nn.Identity()


@pytest.mark.parametrize("change", [another_activation, a_bias_in_the_convolution, another_norm, another_projection])
def test_a_delta_net_that_is_not_quite_as_known_stays(change: Callable[[Any], None]) -> None:
    model = routed("qwen3_5")
    changed, other = model.model.layers[0].linear_attn, model.model.layers[2].linear_attn
    change(changed)
    assert _fused_recurrent(changed) is None and _fused_recurrent(other) is not None


def other_groups(layer: Any) -> None:
    layer.norm.group_size *= 2


def more_taps(layer: Any) -> None:
    layer.conv1d = nn.Conv1d(layer.conv_dim, layer.conv_dim, 17, groups=layer.conv_dim)


def a_hook(layer: Any) -> None:
    layer.norm.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [another_activation, other_groups, more_taps, a_hook])
def test_a_layer_of_mamba2_that_is_not_quite_as_known_stays(change: Callable[[Any], None]) -> None:
    model = routed("granite4")
    changed, other = model.model.layers[0].mamba, model.model.layers[2].mamba
    change(changed)
    assert _fused_recurrent(changed) is None and _fused_recurrent(other) is not None
