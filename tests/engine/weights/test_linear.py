"""Batch invariance of linear layers: a row's result depends on that row alone, to the last bit."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.kernels import load_kernels
from engine.weights.batch_invariant_matmul import BatchInvariantWeight
from engine.weights.linear import PackedLinear, prepare_linears
from engine.weights.packed_weight import KernelWeight, PackedWeight, pack_weight
from tests.resident_memory import resident_bytes

pytestmark = pytest.mark.usefixtures("two_threads")

# Odd sizes reach every tail: of a panel, of a pair along K, of a tile, of a piece of K (1024).
SHAPES = [(1, 1), (3, 17), (17, 3), (33, 64), (100, 130), (130, 100), (64, 1), (1, 100), (20, 2100), (70, 2100)]  # N, K
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 4e-3}  # relative to the largest result

Pack = Callable[[Tensor], PackedWeight]


@pytest.fixture(params=["kernel", "torch"])
def pack(request: pytest.FixtureRequest) -> Pack:
    if request.param == "torch":
        return BatchInvariantWeight
    if load_kernels() is None:
        pytest.skip("no kernels on this machine")
    return KernelWeight


def random_layer(n: int, k: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a random weight [N, K], bias [N] and input x [rows, K]."""
    return torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(rows, k).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def relative_error(result: Tensor, truth: Tensor) -> float:
    return float((result.double() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_is_the_same_alone_and_in_every_batch(pack: Pack, n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias, x = random_layer(n, k, dtype, 80)
    packed = pack(weight)
    whole = packed.multiply(x, bias)
    for rows in range(1, 71):
        offset = rows * 7 % 11
        assert torch.equal(packed.multiply(x[offset : offset + rows], bias), whole[offset : offset + rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(300, 1100), (600, 1700)])
def test_a_row_of_a_large_batch_is_the_same_alone(pack: Pack, n: int, k: int, dtype: torch.dtype) -> None:
    """Large batches run panel by panel, and by pieces of K where rows do not fit into a cache."""
    weight, _, x = random_layer(n, k, dtype, 1061)
    packed = pack(weight)
    whole = packed.multiply(x, None)
    for start, end in [(0, 1), (95, 97), (511, 513), (37, 197), (0, 520), (1030, 1061), (1060, 1061)]:
        assert torch.equal(packed.multiply(x[start:end], None), whole[start:end]), (start, end)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_is_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    """Weights of few columns lie in narrower panels than others."""
    load_kernels() or pytest.skip("no kernels on this machine")
    weight, bias, x = random_layer(150, 333, dtype, 40)
    whole = KernelWeight(weight).multiply(x, bias)
    for first, count in [(0, 1), (7, 8), (3, 16), (31, 17), (60, 32), (60, 33), (149, 1), (50, 100)]:
        part = slice(first, first + count)
        assert torch.equal(KernelWeight(weight[part]).multiply(x, bias[part]), whole[:, part]), (first, count)


def test_a_weight_of_few_columns_has_little_padding() -> None:
    kernels = load_kernels() or pytest.skip("no kernels on this machine")
    columns = {"avx512_bf16": 16, "avx512": 16, "avx2": 8}.get(kernels.isa) or pytest.skip("panels of its own")
    for dtype in (torch.float32, torch.bfloat16):
        assert KernelWeight(torch.ones(8, 100).to(dtype)).packed.numel() == columns * 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40, 700])
def test_a_result_does_not_depend_on_the_number_of_threads(dtype: torch.dtype, rows: int) -> None:
    load_kernels() or pytest.skip("no kernels on this machine")
    weight, bias, x = random_layer(500, 1100, dtype, rows)
    packed, results = KernelWeight(weight), []
    for num_threads in (1, 2, 3, 5):
        torch.set_num_threads(num_threads)
        results.append(packed.multiply(x, bias))
        assert torch.equal(KernelWeight(weight).multiply(x, bias), results[0])  # packing is parallel, too
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_in_huge_pages_gives_what_its_parts_in_small_ones_give(dtype: torch.dtype) -> None:
    load_kernels() or pytest.skip("no kernels on this machine")
    weight, bias, x = random_layer(2100, 1100, dtype, 9)
    whole = KernelWeight(weight).multiply(x, bias)
    for start, end in [(0, 100), (950, 1100), (2000, 2100)]:
        part = KernelWeight(weight[start:end]).multiply(x, bias[start:end])
        assert torch.equal(part, whole[:, start:end]), (start, end)


def test_the_memory_of_a_packed_weight_is_given_back() -> None:
    load_kernels() or pytest.skip("no kernels on this machine")
    weight = torch.ones(8 << 20, 2)
    before = resident_bytes()
    packed = [KernelWeight(weight) for _ in range(4)]
    assert resident_bytes() > before + 200e6
    del packed
    assert resident_bytes() < before + 30e6


def test_small_weights_lie_side_by_side_and_each_gives_its_memory_back() -> None:
    """A mapping of huge pages holds many of them."""
    load_kernels() or pytest.skip("no kernels on this machine")
    before, weight = resident_bytes(), torch.ones(1000, 999)
    packed = [KernelWeight(weight) for _ in range(24)]
    starts = [each.packed.data_ptr() for each in packed]
    distances = [second - first for first, second in itertools.pairwise(starts)]
    assert sum(0 < distance < 1.05 * weight.nbytes for distance in distances) >= 20  # all but at a mapping's end
    assert resident_bytes() > before + 90e6
    kept = packed[::6]
    del packed
    assert resident_bytes() < before + 40e6
    assert all(torch.equal(each.multiply(torch.ones(1, 999), None), torch.full((1, 1000), 999.0)) for each in kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_neighbours_never_leak_into_a_row(pack: Pack, dtype: torch.dtype, poison: float) -> None:
    weight, bias, x = random_layer(70, 67, dtype, 41)
    packed = pack(weight)
    clean = packed.multiply(x, bias)
    for row in (0, 15, 16, 31, 40):
        poisoned = torch.full_like(x, poison)
        poisoned[row] = x[row]
        assert torch.equal(packed.multiply(poisoned, bias)[row], clean[row]), row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_results_are_close_to_the_exact_product(pack: Pack, n: int, k: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias, x = random_layer(n, k, dtype, 37)
    used = bias if has_bias else None
    assert relative_error(pack(weight).multiply(x, used), exact(x, weight, used)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "rows"), [(5, 3, 1), (130, 67, 3), (96, 100, 23), (200, 1500, 17), (64, 32, 530)])
def test_small_integers_come_out_exactly(pack: Pack, n: int, k: int, rows: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randint(-2, 3, (n, k)).to(dtype), torch.randint(-2, 3, (n,)).to(dtype)
    x = (torch.randint(-1, 2, (rows, k)) * (torch.rand(rows, k) < 60 / k)).to(dtype)  # sums stay below 256
    assert torch.equal(pack(weight).multiply(x, bias).double(), exact(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_rounded_once(pack: Pack, dtype: torch.dtype) -> None:
    """The sum is 1 + many values of half a unit in its last place: rounded at every step, it would stay 1."""
    tiny = torch.finfo(torch.bfloat16).eps / 2
    x = torch.tensor([[1.0] + [tiny] * 64]).to(dtype)
    weight = torch.ones(1, 65).to(dtype)
    assert pack(weight).multiply(x, None).item() == 1 + 64 * tiny


def test_half_way_between_two_results_the_even_one_is_taken(pack: Pack) -> None:
    half = torch.finfo(torch.bfloat16).eps / 2
    x = torch.tensor([[1.0, half], [1.0, 3 * half], [-1.0, -half], [-1.0, -3 * half]]).bfloat16()
    results = pack(torch.ones(40, 2).bfloat16()).multiply(x, None)[:, 0].tolist()
    assert results == [1.0, 1 + 4 * half, -1.0, -1 - 4 * half]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_so(pack: Pack, dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    payloads = torch.tensor([0x7FFF, -1], dtype=torch.int16).view(torch.bfloat16)  # the NaNs of the largest bits
    x = torch.cat([torch.tensor([nan, inf, -inf, 3e38]).bfloat16(), payloads])[:, None].to(dtype)
    results = pack(torch.full((70, 1), 2.0).to(dtype)).multiply(x, None)
    assert results[[0, 4, 5]].isnan().all()
    assert results[1:4].eq(torch.tensor([inf, -inf, inf])[:, None]).all()


def test_no_rows_give_no_rows(pack: Pack) -> None:
    assert pack(torch.randn(5, 7)).multiply(torch.empty(0, 7), torch.randn(5)).shape == (0, 5)


def test_rows_and_weights_that_are_not_contiguous_are_understood(pack: Pack) -> None:
    weight, bias, x = random_layer(40, 30, torch.float32, 9)
    expected = pack(weight).multiply(x, bias)
    strided = pack(weight.T.contiguous().T).multiply(x.repeat(1, 2)[:, 30:], bias.repeat_interleave(2)[::2])
    assert torch.equal(strided, expected)


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (torch.randn(2, 8), None),
        (torch.randn(2, 7).bfloat16(), None),
        (torch.randn(2, 7), torch.randn(4)),
        (torch.randn(2, 7), torch.randn(5).bfloat16()),
    ],
)
def test_what_does_not_fit_is_refused(pack: Pack, x: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(RuntimeError):
        pack(torch.randn(5, 7)).multiply(x, bias)


def test_the_kernel_refuses_dtypes_it_does_not_know() -> None:
    load_kernels() or pytest.skip("no kernels on this machine")
    assert isinstance(pack_weight(torch.randn(3, 3).half(), kernels_available=True), BatchInvariantWeight)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        KernelWeight(torch.randn(3, 3).half())


def test_another_layout_than_that_of_a_packed_weight_is_refused() -> None:
    load_kernels() or pytest.skip("no kernels on this machine")
    x, packed = torch.randn(2, 70), torch.ops.twostep.pack_weight(torch.randn(100, 70))
    for wrong in (torch.ones(100, 70, 1, 1), packed[:0], packed[..., :1], packed.transpose(0, 1), packed.flatten()):
        with pytest.raises(RuntimeError, match="packed weight differ"):
            torch.ops.twostep.linear(x, wrong, None, 100)


def test_a_linear_module_keeps_its_function_and_shape(pack: Pack) -> None:
    model = nn.Sequential(nn.Linear(12, 20), Conv1D(9, 20), nn.Linear(9, 4, bias=False))
    x = torch.randn(2, 5, 12)
    expected = model(x).detach()
    report = prepare_linears(model, kernels_available=pack is KernelWeight)
    torch.testing.assert_close(model(x), expected)
    assert report.num_linears == 3 and report.unconverted == ()
    assert all(isinstance(module, PackedLinear) for module in model)


def test_a_weight_that_was_packed_is_let_go_of(pack: Pack) -> None:
    linear = nn.Linear(64, 64)
    model = nn.Sequential(linear)
    report = prepare_linears(model, kernels_available=pack is KernelWeight)
    assert "weight" not in linear._parameters and list(model.parameters()) == []
    assert report.packed_bytes >= (64 * 64 + 64) * 4


def test_an_embedding_keeps_the_weight_it_shares() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    rows = model.embed.weight.detach().clone()
    report = prepare_linears(model, kernels_available=False)
    assert torch.equal(model.embed.weight, rows) and report.unconverted == ()
    torch.testing.assert_close(model.head(rows), rows @ rows.T)


def test_a_module_used_twice_is_packed_once() -> None:
    linear = nn.Linear(6, 6)
    model = nn.Sequential(linear, nn.Sequential(linear))
    assert prepare_linears(model, kernels_available=False).num_linears == 1
    assert model[0] is model[1][0]


def test_what_is_not_understood_is_named() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight.T * 2

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(Doubling(4, 4), nn.Conv1d(4, 4, 3), nn.Embedding(4, 4), hooked, nn.LayerNorm(4))
    assert prepare_linears(model, kernels_available=False).unconverted == ("0.weight", "3.weight")
    assert torch.equal(model[0](torch.eye(4)), model[0].weight.T * 2 + 0)


def test_a_packed_weight_has_shape_dtype_and_device_and_refuses_to_be_read(pack: Pack) -> None:
    linear = nn.Linear(6, 10).bfloat16()
    x = torch.randn(3, 6).bfloat16()
    expected = linear(x).detach()
    model = nn.Sequential(linear)
    prepare_linears(model, kernels_available=pack is KernelWeight)
    weight = model[0].weight
    assert (weight.dtype, weight.device.type, tuple(weight.shape)) == (torch.bfloat16, "cpu", (10, 6))
    torch.testing.assert_close(nn.functional.linear(x, weight, model[0].bias), expected)
    with pytest.raises(NotImplementedError, match="packed"):
        torch.matmul(x, weight)
