"""Quantized products in Triton: of integers bit for bit what their numbers give, in fp8 those of rounded rows."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.core.errors import ModelError
from engine.weights.affine_quantization import dequantize, quantize
from tests.gpu.cross_compile import CAPABILITIES, assert_fit, compiled

pytest.importorskip("triton", reason="pip install -e '.[triton]' brings the interpreter of CUDA kernels")
kernels: Any = import_module("engine.kernels.cuda.linear")
TritonWeight: Any = import_module("engine.weights.triton_weight").TritonWeight
module: Any = import_module("engine.weights.triton_quantized_weight")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
QUANTIZATIONS = ("fp8", "int8", "int4")
ERROR = {"fp8": 0.06, "int8": 0.01, "int4": 0.11}
"""Largest error of products of normally distributed numbers, relative to their standard deviation."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(*sizes: int, dtype: torch.dtype = BF16, device: torch.device) -> Tensor:
    return torch.randn(*sizes).to(device, dtype)


SHAPES = [
    *[(70, 300, BF16), (40, 1088, BF16), (20, 33, F32)],
    *(
        pytest.param(*sizes, marks=pytest.mark.slow)
        for sizes in [(1, 1, BF16), (130, 64, BF16), (40, 1600, BF16), (70, 300, F16), (40, 1100, F32)]
    ),
]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n", "k", "dtype"), SHAPES)
def test_a_product_has_the_bits_that_its_numbers_give(
    triton_device: torch.device, bits: int, n: int, k: int, dtype: torch.dtype
) -> None:
    weight, bias, x = (random(*sizes, dtype=dtype, device=triton_device) for sizes in ((n, k), (n,), (40, k)))
    weight[-1] = 0
    quantized = module.TritonIntegerWeight(weight, bits)
    numbers, filled_up = dequantize(quantize(weight, bits), dtype), (0, quantized.num_missing)
    plain = [kernels.Rows(nn.functional.pad(x, filled_up), dtype), nn.functional.pad(numbers, filled_up), bias]
    tile = kernels.Tile(64, 16, 4, 2, has_parallel_segments=False)
    expected = kernels.linear(*plain, quantized.order, tile)
    for rows in (1, 20, 40):
        assert torch.equal(quantized.multiply(x[:rows], bias), expected[:rows]), rows
        sums = quantized.multiply_in_segments(x[:rows], bias)
        assert isinstance(sums, Tensor) == (quantized.order.num_segments(k) == 1)


@pytest.mark.parametrize(("bits", "num_groups"), [(8, 2), (4, 12)])
def test_what_fills_a_row_up_has_scales_too(triton_device: torch.device, bits: int, num_groups: int) -> None:
    coding = module.TritonIntegerWeight(random(3, 257, device=triton_device), bits).coding  # rows have 384 numbers
    assert coding.scales.transpose(0, 1).flatten(1).shape == (3, num_groups)


def rounded_to_e4m3(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of rows, as doubles, and their scales, by the formula that defines them."""
    largest = rows.float().abs().amax(dim=1, keepdim=True)
    scales = (largest / 448).where(largest > 0, 1)
    return (rows.float() / scales).to(torch.float8_e4m3fn).double(), scales


@pytest.mark.parametrize(("n", "k", "dtype"), SHAPES)
def test_a_product_in_fp8_is_that_of_rounded_rows(
    triton_device: torch.device, n: int, k: int, dtype: torch.dtype
) -> None:
    weight, bias, x = (random(*sizes, dtype=dtype, device=triton_device) for sizes in ((n, k), (n,), (40, k)))
    weight[-1], x[3] = 0, 0
    product = module.TritonFp8Weight(weight).multiply(x, bias)
    (codes, scales), (rows, row_scales) = rounded_to_e4m3(weight), rounded_to_e4m3(x)
    expected = (rows @ codes.T) * row_scales * scales.T + bias
    assert product.dtype == dtype
    # Tensor cores on Hopper keep some 14 bits of a sum of products in e4m3, of 128 at most.
    assert (product - expected).abs().max() <= {F32: 3e-4, BF16: 8e-3, F16: 2e-3}[dtype] * expected.abs().max()


def test_a_row_in_fp8_is_the_same_alone_and_in_every_batch(triton_device: torch.device) -> None:
    packed, x = module.TritonFp8Weight(random(70, 1100, device=triton_device)), random(150, 1100, device=triton_device)
    whole = packed.multiply(x, None)
    for start, rows in [(0, 1), (149, 1), (7, 3), (5, 17), (80, 64), (20, 110)]:
        assert torch.equal(packed.multiply(x[start : start + rows], None), whole[start : start + rows]), rows


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_numbers_that_are_none_stay_in_their_row(triton_device: torch.device) -> None:
    packed, x = module.TritonFp8Weight(random(70, 100, device=triton_device)), random(5, 100, device=triton_device)
    expected = packed.multiply(x, None)
    x[2, 5], x[3, 7] = torch.nan, torch.inf
    result = packed.multiply(x, None)
    assert torch.equal(result[[0, 1, 4]], expected[[0, 1, 4]])
    assert not result[2:4].isfinite().any()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_errors_and_sizes_are_those_of_the_format(triton_device: torch.device, quantization: str) -> None:
    weight, x = random(64, 512, device=triton_device), random(16, 512, device=triton_device)
    quantized = module.triton_quantized(weight, quantization)
    truth = x.double() @ weight.double().T
    assert (quantized.multiply(x, None).double() - truth).std() < ERROR[quantization] * truth.std()
    bits_per_number = {"fp8": 8 + 32 / 512, "int8": 8 + 32 / 256, "int4": 4 + 32 / 32}
    assert quantized.nbytes * 8 == bits_per_number[quantization] * weight.numel()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_weight_with_numbers_that_are_none_is_refused(
    triton_device: torch.device, quantization: str, number: float
) -> None:
    weight = random(8, 64, device=triton_device)
    weight[3, 5] = number
    with pytest.raises(ModelError, match="has NaN or infinity"):
        module.triton_quantized(weight, quantization)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_experts_together_have_the_bits_of_experts_one_by_one(triton_device: torch.device, quantization: str) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from engine.weights.moe import PackedExperts
    from engine.weights.triton_experts import triton_experts

    experts: nn.Module = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=96, moe_intermediate_size=32, num_experts=5))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    experts = experts.requires_grad_(False).to(triton_device, BF16)
    packed = PackedExperts(experts, lambda weight: module.triton_quantized(weight, quantization))
    x, weights = random(6, 96, device=triton_device), torch.rand(6, 3, device=triton_device).softmax(dim=-1)
    chosen = torch.rand(6, 5, device=triton_device).topk(3).indices
    expected = packed.run_one_by_one(x, chosen, weights)
    together: Any = triton_experts(packed.experts, packed.up, packed.down)
    assert expected.abs().max() > 0
    assert torch.equal(together.run(x, chosen, weights), expected)
    assert torch.equal(packed.run_one_by_one(x, chosen, weights), expected)  # of the joined scales


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_quantized_products_fit_into_every_gpu_and_use_its_tensor_cores(capability: int) -> None:
    """Tiles of prompts spill a sum between segments, outside of the loop over K: an H200 took no longer for that."""
    usages = compiled("tests.gpu.quantized_launches:launch_all", (capability,))
    assert_fit(usages, lambda usage: 400 if usage.constants.get("BLOCK_T") == "128" else 32)
    products = [usage for usage in usages if usage.kernel in ("_linear_kernel", "_multiply_by_experts_kernel")]
    assert products and all(usage.products > 0 for usage in products)
