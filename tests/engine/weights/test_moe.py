"""Whole models compute the same once linear layers, experts and routers are packed; experts are batch invariant."""

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from engine.kernels import load_kernels
from engine.weights.linear import prepare_linears
from engine.weights.moe import PackedExperts, PackedLlama4Experts, RouterWeight, is_experts, is_router, pack_router
from engine.weights.packing_policy import packing_for
from tests.engine.tiny_models import ARCHITECTURES, SPARSE, make_config

EXPERT_MODELS = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "llama4"]
HYBRIDS_WITH_EXPERTS = [
    "granite4",
    "jamba",
    "kimi_linear",
    "minimax",
    "qwen3_5_moe",
    "lfm2_moe",
    "nemotron_h",
]  # in some of their layers
WITH_SHARED_EXPERTS = [
    *(*sorted(SPARSE), "qwen2_moe", "glm4_moe", "dots1", "ernie4_5_moe", "exaone_moe", "hy_v3", "granitemoeshared"),
]
FURTHER_WITH_EXPERTS = [
    *("granitemoe", "minimax_m2", "mellum", "flex_olmo", "deepseek_v2", "deepseek_halves", "glm4_moe_lite"),
    *("phimoe", "granitemoe_swa", "cohere2_moe", "cohere2_moe_sigmoid", "qwen4"),
]
WITH_LINEAR_ROUTERS = ["hunyuan_moe", "gemma4_moe", "afmoe", "zaya"]
IDS = torch.arange(1, 19).view(2, 9) * 7 % 190


@pytest.fixture(params=["kernel", "torch"])
def kernels_available(request: pytest.FixtureRequest) -> bool:
    if request.param == "kernel" and load_kernels() is None:
        pytest.skip("no kernels on this machine")
    return bool(request.param == "kernel")


def config_of(name: str) -> transformers.PreTrainedConfig:
    if name in ARCHITECTURES:
        return make_config(name)
    config = {**make_config("mixtral").to_dict(), "head_dim": 8}
    if name == "olmoe":
        return transformers.OlmoeConfig(**{**config, "num_experts": 4})
    return transformers.Llama4TextConfig(**{**config, "interleave_moe_layer_step": 1})


def wide_config_of(name: str) -> transformers.PreTrainedConfig:
    """Returns a config of sizes in whole vectors: torch's own activations treat elements after the last differently."""
    sizes = dict.fromkeys(["hidden_size", "intermediate_size", "moe_intermediate_size", "intermediate_size_mlp"], 64)
    experts = dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts"], 32)
    config = config_of(name)
    for key, value in {**sizes, **experts}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    return config


def random_model(config: transformers.PreTrainedConfig) -> nn.Module:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(IDS, use_cache=False).logits


def expert_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that route rows to experts."""
    kinds = (PackedExperts, PackedLlama4Experts)
    return [module for module in model.modules() if any(isinstance(child, kinds) for child in module.children())]


def rows_of(block: nn.Module, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
    with torch.inference_mode():
        result = block(x[None])
    return (result[0] if isinstance(result, tuple) else result).view(x.shape)


# RecurrentGemma's gates are linear layers only where its blocks are replaced, as test_replacement.py has them; so are
# parts of DeepSeek-V4's layers. The numbers of all heads' norms are a matrix where norms are not fused.
@pytest.mark.parametrize(
    "name",
    sorted(
        {*ARCHITECTURES, *EXPERT_MODELS} - {"recurrent_gemma", "cohere_normed", "deepseek_v4", "inkling", "inkling2"}
    ),
)
def test_a_packed_model_computes_what_it_did(name: str, kernels_available: bool) -> None:
    model = random_model(config_of(name))
    expected = logits(model)
    report = prepare_linears(model, kernels_available)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert report.unconverted == () and report.num_linears > 0
    with_routers = EXPERT_MODELS + HYBRIDS_WITH_EXPERTS + WITH_SHARED_EXPERTS + FURTHER_WITH_EXPERTS
    assert (report.num_experts > 0) == (name in with_routers + WITH_LINEAR_ROUTERS)
    assert (report.num_routers > 0) == (name in with_routers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_a_row_leaves_the_experts_the_same_alone_and_in_every_batch(
    name: str, dtype: torch.dtype, kernels_available: bool
) -> None:
    model = random_model(wide_config_of(name)).to(dtype)
    prepare_linears(model, kernels_available)
    block = expert_blocks(model)[0]
    x = torch.randn(40, 64).to(dtype)
    whole = rows_of(block, x)
    for rows in range(1, 40, 6):
        offset = rows * 5 % (41 - rows)
        assert torch.equal(rows_of(block, x[offset : offset + rows]), whole[offset : offset + rows]), rows


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_experts_of_every_description_match_transformers_own(
    has_gate: bool, has_bias: bool, is_transposed: bool, kernels_available: bool
) -> None:
    experts = make_experts(has_gate, has_bias, is_transposed)
    x, index, weights = torch.randn(11, 6), torch.randint(0, 5, (11, 3)), torch.rand(11, 3)
    expected = experts(x, index, weights).detach()
    packed = PackedExperts(copy.deepcopy(experts), packing_for("none", kernels_available).layers)
    torch.testing.assert_close(packed(x, index, weights), expected, rtol=1e-4, atol=1e-5)


def make_experts(has_gate: bool, has_bias: bool, is_transposed: bool) -> nn.Module:
    """Returns five experts of width 6 to 8 that run through transformers' batched implementation."""
    torch.manual_seed(2)

    class Experts(nn.Module):
        def __init__(self, config: transformers.PreTrainedConfig) -> None:
            super().__init__()
            self.num_experts, self.act_fn = 5, nn.SiLU()
            self.post_expert_norm = nn.LayerNorm(6)
            first, width = ("gate_up_proj", 16) if has_gate else ("up_proj", 8)
            for name, num_out, num_in in [(first, width, 6), ("down_proj", 6, 8)]:
                shape = (5, num_in, num_out) if is_transposed else (5, num_out, num_in)
                setattr(self, name, nn.Parameter(torch.randn(shape)))
                if has_bias:
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(5, num_out)))

        def forward(self) -> None:
            raise AssertionError

    described: Callable[..., type[nn.Module]] = transformers.integrations.moe.use_experts_implementation(
        has_gate=has_gate, has_bias=has_bias, is_transposed=is_transposed, has_post_expert_norm=True
    )
    config = transformers.LlamaConfig()
    config._experts_implementation = "batched_mm"
    return described(Experts)(config)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_a_gate_have_the_bits_of_one_by_one(dtype: torch.dtype, quantization: str) -> None:
    config = make_config("nemotron_h")
    experts = NemotronHExperts(config).to(dtype).requires_grad_(False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    packed = PackedExperts(experts, packing_for(quantization, True).layers)
    x, index, weights = torch.randn(37, 16).to(dtype), torch.rand(37, 8).topk(3).indices, torch.rand(37, 3)
    assert packed.parts is not None and packed.parts.gate.name == "square_relu"
    assert torch.equal(packed(x, index, weights), packed.run_one_by_one(x, index, weights))


def test_an_expert_that_no_row_chose_is_not_run(kernels_available: bool) -> None:
    packed = PackedExperts(make_experts(True, False, False), packing_for("none", kernels_available).layers)
    ran: list[int] = []
    run = packed._run_expert
    packed._run_expert = lambda expert, x: (ran.append(expert), run(expert, x))[1]  # type: ignore[method-assign]
    packed(torch.randn(2, 6), torch.tensor([[3, 1], [1, 3]]), torch.rand(2, 2))
    assert ran == [1, 3]


def test_a_router_may_ask_for_its_weight_in_float32(kernels_available: bool) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x.type(torch.float32), self.weight.type(torch.float32))

    router, x = Router(), torch.randn(3, 6).bfloat16()
    expected = router(x).detach()
    assert is_router(router)
    pack_router(router, packing_for("none", kernels_available).routers)
    torch.testing.assert_close(router(x), expected)
    assert router(x).dtype is router.weight.float().dtype is torch.float32
    assert router.weight.to(torch.float32) is router.weight.float()


def test_a_router_s_weights_may_have_any_name(kernels_available: bool) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fn, self.further = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(2, 6))
            self.fn_bias = nn.Parameter(torch.randn(4, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = nn.functional.linear(x, self.fn.float())
            return first + self.fn_bias.sum(), nn.functional.linear(x, self.further)

    router, x = Router(), torch.randn(3, 6)
    expected = router(x)
    assert prepare_linears(router, kernels_available).unconverted == ("fn_bias",)
    assert isinstance(router.fn, RouterWeight) and isinstance(router.further, RouterWeight)
    for product, one in zip(router(x), expected, strict=True):
        torch.testing.assert_close(product, one.detach())


def test_a_module_that_uses_its_weight_otherwise_is_no_router() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight) + self.weight.sum()

    assert not is_router(Mixed()) and not is_router(nn.LayerNorm(4)) and not is_experts(Mixed())
    assert prepare_linears(nn.Sequential(Mixed()), kernels_available=False).unconverted == ("0.weight",)
