"""The product in Triton: its error, and that a row has the same bits in every batch and in every tile."""

from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.weights.packed_weight import pack_weight
from tests.gpu.cross_compile import CAPABILITIES, assert_fit, compiled

pytest.importorskip("triton", reason="pip install -e '.[triton]' brings the interpreter of CUDA kernels")
kernels: Any = import_module("engine.kernels.cuda.linear")
TritonWeight: Any = import_module("engine.weights.triton_weight").TritonWeight

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ERROR = {F32: 4e-6, BF16: 8e-3, F16: 1e-3}  # relative to the largest result
SHAPES = [(1, 1), (130, 300), (70, 1100), (40, 1600)]  # N, K: with tails of every kind, up to three segments
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(*sizes: int, dtype: torch.dtype = BF16, device: torch.device) -> Tensor:
    return torch.randn(*sizes).to(device, dtype)


def sums(x: Tensor, weight: Tensor, has_parallel_segments: bool) -> Tensor:
    """The product in segments of 64."""
    tile = kernels.Tile(64, 16, 4, 2, has_parallel_segments)
    return kernels.linear(kernels.Rows(x, x.dtype), weight, None, kernels.SumOrder(32, 64), tile)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_is_right_up_to_rounding(triton_device: torch.device, n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias, x = (random(*sizes, dtype=dtype, device=triton_device) for sizes in ((n, k), (n,), (20, k)))
    expected = x.double() @ weight.double().T
    for added, truth in ((None, expected), (bias, expected + bias.double())):
        result = TritonWeight(weight).multiply(x, added)
        assert result.dtype == dtype
        assert (result.double() - truth).abs().max() <= ERROR[dtype] * truth.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_is_the_same_alone_and_in_every_batch(
    triton_device: torch.device, n: int, k: int, dtype: torch.dtype
) -> None:
    weight, bias, x = (random(*sizes, dtype=dtype, device=triton_device) for sizes in ((n, k), (n,), (150, k)))
    packed = TritonWeight(weight)
    whole = packed.multiply(x, bias)
    for start, rows in [(0, 1), (149, 1), (7, 3), (5, 17), (80, 64), (20, 110)]:
        assert torch.equal(packed.multiply(x[start : start + rows], bias), whole[start : start + rows]), rows


def test_a_row_is_the_same_in_a_tile_of_16_rows_and_of_64(triton_device: torch.device) -> None:
    weight, x = random(40, 1100, device=triton_device), random(33, 1100, device=triton_device)
    packed = TritonWeight(weight)
    assert torch.equal(packed.multiply(x[30:], None), packed.multiply(x, None)[30:])


@pytest.mark.slow
@pytest.mark.parametrize("num_segments", [1, 3])
def test_all_tiles_give_the_same_bits(triton_device: torch.device, num_segments: int) -> None:
    x, weight, bias = (random(*sizes, device=triton_device) for sizes in ((20, 192), (70, 192), (70,)))
    order = kernels.SumOrder(64, 192 // num_segments)
    tiles = [kernels.Tile(n, t, 4, 2, p) for n, t, p in product((64, 128), (16, 32, 64, 128, 256), (False, True))]
    first, *others = (kernels.linear(kernels.Rows(x, BF16), weight, bias, order, tile) for tile in tiles)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("has_parallel_segments", [False, True])
def test_segments_are_summed_from_zero_and_added_in_their_order(
    triton_device: torch.device, has_parallel_segments: bool
) -> None:
    x = torch.ones(1, 192, device=triton_device)
    within, across = torch.zeros(2, 1, 192, device=triton_device)
    within[0, [0, 64, 65]] = torch.tensor([2.0**24, 1, 1], device=triton_device)
    across[0, [0, 64, 128]] = torch.tensor(
        [2.0**24, 1, 2], device=triton_device
    )  # the 1, if it is next, is rounded away
    assert sums(x, within, has_parallel_segments) == 2**24 + 2
    assert sums(x, across, has_parallel_segments) == 2**24 + 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("rows", [3, 70])
def test_numbers_that_are_none_stay_in_their_row(triton_device: torch.device, rows: int) -> None:
    packed, x = TritonWeight(random(70, 100, device=triton_device)), random(rows, 100, device=triton_device)
    expected = packed.multiply(x, None)
    x[-2] = torch.inf
    x[-2, 5] = torch.nan
    others = [row for row in range(rows) if row != rows - 2]
    assert torch.equal(packed.multiply(x, None)[others], expected[others])


def test_rows_and_biases_with_gaps_give_what_copies_give(triton_device: torch.device) -> None:
    packed = TritonWeight(random(130, 128, device=triton_device).repeat(1, 2)[:, 64:192])
    table, biases = random(20, 333, device=triton_device), random(130, 2, device=triton_device)
    for rows in (table[:, :128], table[:, 3:131], table[::2, 128:256], table.t()[:128].t()):
        expected = packed.multiply(rows.clone(memory_format=torch.contiguous_format), biases[:, 1].clone())
        assert torch.equal(packed.multiply(rows, biases[:, 1]), expected)


def test_rows_may_lie_far_apart(triton_device: torch.device) -> None:
    weight = random(64, 64, device=triton_device)
    far = torch.empty((2 << 30) + 64, dtype=BF16, device=triton_device).as_strided((3, 64), (1 << 30, 1))
    far.copy_(random(3, 64, device=triton_device))
    assert torch.equal(TritonWeight(weight).multiply(far, None), TritonWeight(weight).multiply(far.contiguous(), None))
    assert torch.equal(TritonWeight(far).multiply(weight, None), TritonWeight(far.contiguous()).multiply(weight, None))


def test_no_rows_give_no_rows(triton_device: torch.device) -> None:
    packed = TritonWeight(random(70, 100, device=triton_device))
    assert packed.multiply(random(0, 100, device=triton_device), None).shape == (0, 70)


def test_rows_of_another_width_or_format_are_refused(triton_device: torch.device) -> None:
    packed = TritonWeight(random(70, 100, device=triton_device))
    for x in (random(2, 99, device=triton_device), random(2, 100, dtype=F16, device=triton_device)):
        with pytest.raises(RuntimeError, match=r"rows \[2, .* do not fit a weight \[70, 100\] in torch.bfloat16"):
            packed.multiply(x, None)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_segments_cover_a_row_and_depend_on_the_shape_alone(dtype: torch.dtype) -> None:
    for num_out, num_in in product((1, 64, 1000, 4096, 6144, 128256), (1, 64, 1000, 2880, 4096, 14336, 53248)):
        order = kernels.sum_order(num_out, num_in, dtype)
        num_segments = order.num_segments(num_in)
        assert (num_segments - 1) * order.segment < num_in <= num_segments * order.segment
        assert order.segment % order.block_k == 0 and (num_segments == 1 or order.segment >= 512)
    assert kernels.sum_order(128256, 4096, dtype).num_segments(4096) == 1
    assert kernels.sum_order(4096, 4096, dtype).num_segments(4096) > 1


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_tiles_fit_into_shared_memory(kib: int) -> None:
    for rows, num_out, num_segments in product((1, 17, 64, 65, 200, 5000), (64, 4096, 128256), (1, 4)):
        tile = kernels.tile_for(rows, num_out, num_segments, BF16, kib << 10)
        assert tile.num_stages * (tile.block_n + tile.block_t) * 64 * 2 <= kib << 10
        assert tile.block_t >= min(rows, 128)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_fit_into_every_gpu_and_use_its_tensor_cores(capability: int) -> None:
    usages = compiled("tests.gpu.linear_launches:launch_all", (capability,))
    assert_fit(usages)
    products = [usage for usage in usages if usage.kernel == "_linear_kernel"]
    assert sum(usage.products > 0 for usage in products) == 6  # all but those in float32


@pytest.mark.parametrize("mark", [pytest.param(None, marks=gpu)])
def test_a_weight_on_a_gpu_is_packed_for_it(mark: None) -> None:
    weight = torch.randn(64, 64, device="cuda")
    assert all(isinstance(pack_weight(weight.to(dtype), False), TritonWeight) for dtype in (F32, BF16, F16))


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=gpu) for rows in (1, 64, 300)])
def test_a_replayed_product_is_the_same(rows: int) -> None:
    packed, x = TritonWeight(torch.randn(4096, 4096, device="cuda").to(BF16)), torch.zeros(rows, 4096, device="cuda")
    x = x.to(BF16)
    packed.multiply(x, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = packed.multiply(x, None)
    x.normal_()
    graph.replay()
    assert torch.equal(result, packed.multiply(x, None))
