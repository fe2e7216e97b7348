"""Experts in Triton have, bit for bit, what they have one by one, whatever rows share an expert."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.weights.batch_invariant_matmul import BatchInvariantWeight
from engine.weights.latent_heads import LatentHeads
from engine.weights.moe import PackedExperts
from tests.gpu.cross_compile import CAPABILITIES, assert_fit, compiled

pytest.importorskip("triton", reason="pip install -e '.[triton]' brings the interpreter of CUDA kernels")
kernels: Any = import_module("engine.kernels.cuda.experts")
triton_experts: Any = import_module("engine.weights.triton_experts").triton_experts
TritonStack: Any = import_module("engine.weights.triton_experts").TritonStack
TritonWeight: Any = import_module("engine.weights.triton_weight").TritonWeight

EXPERTS, HIDDEN, INNER = 5, 96, 32  # whole vectors: torch's activations on the CPU treat elements after the last apart
BF16, F32 = torch.bfloat16, torch.float32
ROUTES = {
    "any": lambda rows: torch.rand(rows, EXPERTS).topk(3).indices,
    "all rows one expert": lambda rows: torch.full((rows, 1), 4),
    "one expert twice": lambda rows: torch.tensor([[2, 2]]).repeat(rows, 1),
    "few experts": lambda rows: torch.tensor([[3, 1], [1, 4], [3, 4]])[torch.arange(rows) % 3],
    "all experts": lambda rows: torch.stack([torch.randperm(EXPERTS) for _ in range(rows)]),
}
"""Number of rows -> their experts [T, S]."""
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def experts_of(kind: str, hidden: int = HIDDEN, inner: int = INNER) -> nn.Module:
    torch.manual_seed(3)
    if kind == "gpt_oss":
        config: Any = GptOssConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=EXPERTS)
        experts: nn.Module = GptOssExperts(config)
    elif kind == "mixtral":
        config = MixtralConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=EXPERTS)
        experts = MixtralExperts(config)
    else:
        config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=EXPERTS)
        experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=2 / hidden**0.5)
    return experts.requires_grad_(False)


def packed(kind: str, dtype: torch.dtype, device: torch.device, **sizes: int) -> PackedExperts:
    return PackedExperts(experts_of(kind, **sizes).to(device, dtype), TritonWeight)


def run(experts: PackedExperts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    together = triton_experts(experts.experts, experts.up, experts.down)
    return together.run(x, chosen, weights)


def check(experts: PackedExperts, x: Tensor, chosen: Tensor) -> None:
    weights = torch.rand(chosen.shape, device=x.device).softmax(dim=-1)
    for each in (weights, weights.to(x.dtype)):
        expected = experts.run_one_by_one(x, chosen, each)
        assert expected.isfinite().all() and expected.abs().max() > 0
        assert torch.equal(run(experts, x, chosen, each), expected), (chosen.shape, each.dtype)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_matrices_of_heads_have_the_bits_of_each_by_itself(
    triton_device: torch.device, num_rows: int, dtype: torch.dtype
) -> None:
    heads = LatentHeads(torch.randn(3 * 28, 24).to(triton_device, dtype), num_heads=3, key_size=12)
    heads.pack(TritonWeight)
    for weights, size in ((heads.weights[:3], 12), (heads.weights[3:], 24)):
        x = torch.randn(3, num_rows, size).to(triton_device, dtype)
        expected = torch.stack([weight.multiply(rows, None) for weight, rows in zip(weights, x, strict=True)])
        assert torch.equal(TritonStack(weights, None).multiply_each(x), expected) and expected.any()
    query = torch.randn(num_rows, 3, 12 + 4).to(triton_device, dtype)
    assert heads.absorb(query).shape == (num_rows, 3, 24 + 4)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_together_have_the_bits_of_experts_one_by_one(triton_device: torch.device, kind: str) -> None:
    experts = packed(kind, BF16, triton_device)
    for rows in (1, 4):
        check(experts, torch.randn(rows, HIDDEN).to(triton_device, BF16), ROUTES["any"](rows).to(triton_device))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("routes", ROUTES)
def test_rows_of_every_route_have_the_bits_of_experts_one_by_one(
    triton_device: torch.device, routes: str, dtype: torch.dtype
) -> None:
    experts = packed("gpt_oss", dtype, triton_device)
    for rows in (1, 17, 130):
        check(experts, torch.randn(rows, HIDDEN).to(triton_device, dtype), ROUTES[routes](rows).to(triton_device))


@pytest.mark.slow
def test_experts_with_several_segments_and_tails_have_the_bits_of_experts_one_by_one(
    triton_device: torch.device,
) -> None:
    """Neither size is a whole number of tiles or steps; the first matrix has two segments along K."""
    experts = packed("qwen3_moe", F32, triton_device, hidden=1032, inner=24)
    assert experts.up.weights[0].order.num_segments(1032) == 2
    for rows in (2, 30):
        check(experts, torch.randn(rows, 1032).to(triton_device), ROUTES["any"](rows).to(triton_device))


def test_a_row_is_the_same_alone_and_in_every_batch(triton_device: torch.device) -> None:
    experts, chosen = packed("mixtral", BF16, triton_device), ROUTES["any"](40).to(triton_device)
    x, weights = torch.randn(40, HIDDEN).to(triton_device, BF16), torch.rand(40, 3).to(triton_device)
    whole = run(experts, x, chosen, weights)
    for rows in (slice(0, 1), slice(39, 40), slice(20, 27)):
        assert torch.equal(run(experts, x[rows], chosen[rows], weights[rows]), whole[rows])


def test_a_number_that_is_no_experts_adds_zero(triton_device: torch.device) -> None:
    experts, x = packed("mixtral", BF16, triton_device), torch.randn(2, HIDDEN).to(triton_device, BF16)
    weights = torch.rand(2, 2).to(triton_device)
    alone = run(experts, x, torch.tensor([[3], [1]]).to(triton_device), weights[:, :1].contiguous())
    for none in (EXPERTS, -1):
        chosen = torch.tensor([[3, none], [1, none]]).to(triton_device)
        assert torch.equal(run(experts, x, chosen, weights), alone)


def test_no_rows_give_no_rows(triton_device: torch.device) -> None:
    experts, chosen = packed("mixtral", BF16, triton_device), ROUTES["any"](1)[:0].to(triton_device)
    x = torch.empty(0, HIDDEN, dtype=BF16, device=triton_device)
    assert run(experts, x, chosen, torch.empty(0, 3, device=triton_device)).shape == (0, HIDDEN)


@pytest.mark.parametrize("slots", [1, 700, 1500])
def test_slots_are_sorted_by_expert_and_then_by_number(triton_device: torch.device, slots: int) -> None:
    chosen = torch.randint(0, 11, (slots, 1))
    found = kernels.sort_slots(chosen.to(triton_device), 11)
    assert torch.equal(found.slots.cpu().long(), torch.argsort(chosen[:, 0], stable=True))
    assert torch.equal(found.ends.cpu().long(), torch.bincount(chosen[:, 0], minlength=11).cumsum(0))


def test_experts_with_other_weights_or_a_norm_after_them_are_left_to_the_plain_path(
    triton_device: torch.device,
) -> None:
    module = experts_of("mixtral").to(triton_device)
    experts = PackedExperts(module, TritonWeight)
    assert triton_experts(module, experts.up, experts.down) is not None
    module.has_post_expert_norm = True
    assert triton_experts(module, experts.up, experts.down) is None
    other = PackedExperts(experts_of("mixtral").to(triton_device), BatchInvariantWeight)
    assert triton_experts(other.experts, other.up, other.down) is None


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_experts_fit_into_every_gpu(capability: int) -> None:
    assert_fit(compiled("tests.gpu.expert_launches:launch_all", (capability,)))


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=gpu) for rows in (1, 64)])
def test_experts_on_a_gpu_run_together_and_replay_what_they_choose(rows: int) -> None:
    experts = packed("mixtral", BF16, torch.device("cuda"))
    x, chosen = torch.zeros(rows, HIDDEN, dtype=BF16, device="cuda"), torch.zeros(rows, 2, dtype=torch.int64).cuda()
    weights = torch.rand(rows, 2).cuda()
    experts(x, chosen, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = experts(x, chosen, weights)
    x.normal_()
    chosen.copy_(torch.rand(rows, EXPERTS).topk(2).indices)
    graph.replay()
    assert torch.equal(result, experts.run_one_by_one(x, chosen, weights))
