"""Weights coded in 12 bits a number, or 11 with AMX: exactly the products of the same weights in 16."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels import load_kernels
from engine.weights.packed_weight import KernelWeight

pytestmark = pytest.mark.usefixtures("two_threads")

SHAPES = [(33, 1), (33, 31), (40, 32), (64, 2), (70, 2100), (300, 520), (1000, 896), (130, 513)]  # N, K
ROWS = (1, 2, 5, 6, 7, 12, 13, 16, 17, 32, 33, 47, 64, 100, 192, 193, 257, 600)
PER_EXCEPTION = 256  # numbers per exception, where a panel has as many as it may have
PER_LISTED = 4  # numbers per listed one, where a weight has as many as it may have

# Where the numbers are that are not in their panel's table: slices of outputs and of positions along K.
SPREADS = {
    "first": (slice(0, 1), slice(0, 1)),
    "last": (slice(-1, None), slice(-1, None)),
    "everywhere": (slice(None, None, 19), slice(None, None, 31)),
    "one step": (slice(0, 8), slice(320, 327)),
    "one output": (slice(40, 41), slice(0, 60)),
}
DENSE_SPREADS = {
    "a quarter": (slice(None), slice(None, None, 4)),
    "a panel": (slice(32, 64), slice(None)),
    "one step of two panels": (slice(0, 64), slice(320, 327)),
}


# Outputs that share a table.
PANELS = {"amx": 32, "avx512_bf16": 64, "avx512": 64, "avx2": 16}


@pytest.fixture(autouse=True)
def _with_coding() -> None:
    kernels = load_kernels()
    if kernels is None or kernels.isa not in PANELS:
        pytest.skip("weights are coded with AVX2 or AVX512 only")


def codes_exponents() -> bool:
    """Whether exponents are coded, in 11 bits a number; else high bytes are, in 12."""
    kernels = load_kernels()
    return kernels is not None and kernels.isa == "amx"


def panel() -> int:
    kernels = load_kernels()
    return 0 if kernels is None else PANELS[kernels.isa]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def assert_exact(weight: Tensor, rows: tuple[int, ...] = ROWS) -> None:
    """Asserts that the weight is coded, and multiplied as if it were not."""
    coded, plain = KernelWeight(weight), KernelWeight(weight, may_be_coded=False)
    assert coded.packed.dtype == torch.uint8 and plain.packed.dtype == torch.bfloat16
    x, bias = torch.randn(max(rows), weight.shape[1]).bfloat16(), torch.randn(weight.shape[0]).bfloat16()
    for count in rows:
        assert torch.equal(bits(coded.multiply(x[:count], bias)), bits(plain.multiply(x[:count], bias))), count


def assert_numbers_come_back(weight: Tensor) -> None:
    """Asserts that rows of the identity matrix return each number of a weight without NaN and minus zero."""
    coded = KernelWeight(weight)
    assert coded.packed.dtype == torch.uint8
    picked = coded.multiply(torch.eye(weight.shape[1]).bfloat16(), None)
    assert torch.equal(picked.T, weight)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_those_of_the_plain_weight(n: int, k: int) -> None:
    assert_exact(torch.randn(n, k).bfloat16())


@pytest.mark.parametrize("exponent", [-130, -60, -7, 0])
def test_numbers_of_any_size(exponent: int) -> None:
    assert_exact((torch.randn(64, 256).double() * 2.0**exponent).bfloat16(), rows=(1, 40, 70))


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, torch.rand, torch.randn], ids=lambda make: make.__name__)
def test_every_number_comes_back(make: Callable[..., Tensor]) -> None:
    assert_numbers_come_back(make(64, 320).bfloat16())


def test_every_panel_has_a_table_of_its_own() -> None:
    sizes = 2.0 ** (torch.arange(8) * 14 - 100).repeat_interleave(panel())
    assert_exact((torch.randn(8 * panel(), 128).double() * sizes[:, None]).bfloat16(), rows=(1, 40, 70))


def test_what_is_not_finite_stays_what_it_is() -> None:
    weight = torch.randn(128, 512).bfloat16()
    weight[3, 100], weight[40, 500], weight[63, 0] = float("inf"), float("nan"), -float("inf")
    assert_exact(weight)


def test_numbers_of_few_columns_are_left_as_they_are() -> None:
    """Panels of one vector, with less padding than one that is coded has, are read instead; AMX has one width only."""
    for columns in (1, 8):
        assert (KernelWeight(torch.randn(columns, 64).bfloat16()).packed.dtype == torch.uint8) == codes_exponents()


def test_numbers_without_pattern_are_left_as_they_are() -> None:
    weight = torch.randint(-(2**15), 2**15, (64, 64)).short().view(torch.bfloat16)
    assert KernelWeight(weight).packed.dtype == torch.bfloat16


class TestHighBytes:
    """Coding in 12 bits: exceptions are numbers whose high byte is not among the 16 of their panel."""

    @pytest.fixture(autouse=True)
    def _with_vectors(self) -> None:
        if codes_exponents():
            pytest.skip("high bytes are coded without AMX only")

    @staticmethod
    def common(panels: int = 2, panel_size: int = 64 * 512) -> tuple[Tensor, Tensor]:
        """Returns a weight of 16 high bytes, and the bits of its numbers."""
        shape = (panels * panel(), panel_size // panel())
        words = (0x3000 + torch.randint(16, shape) * 256 + torch.randint(256, shape)).short()
        return words.view(torch.bfloat16), words

    @pytest.mark.parametrize("spread", SPREADS)
    def test_products_are_exact(self, spread: str) -> None:
        weight, words = self.common()
        rare = SPREADS[spread]
        words[rare] = torch.randint(0x4100, 0x4200, words[rare].shape).short()
        words[rare][::2] ^= -0x8000  # another sign
        assert_exact(weight)
        assert_numbers_come_back(weight)

    @pytest.mark.parametrize("count", range(30))
    def test_any_number_of_them_fits(self, count: int) -> None:
        """Codes follow the list: zeros here, which would read as an exception of number 0."""
        weight, words = self.common(1)
        words[:, ::2] = words[:8, :8] = 0x3000
        words[8:].view(-1)[torch.randperm(words[8:].numel())[:count]] = 0x4242
        assert_exact(weight, rows=(1, 64))

    def test_a_weight_with_too_many_is_left_as_it_is(self) -> None:
        weight, words = self.common(1)
        most = words.numel() // PER_EXCEPTION
        words.view(-1)[:most] = 0x4242
        assert KernelWeight(weight).packed.dtype == torch.uint8
        words.view(-1)[most] = 0x4242
        assert KernelWeight(weight).packed.dtype == torch.bfloat16

    def test_one_panel_with_too_many_leaves_all_as_they_are(self) -> None:
        weight, words = self.common(10, 64 * 128)
        words[9 * panel(), :64] = 0x4242
        assert KernelWeight(weight).packed.dtype == torch.bfloat16

    @pytest.mark.parametrize("scale", [0.02, 1.0])
    def test_few_of_the_numbers_that_models_have_are_rare(self, scale: float) -> None:
        for weight in (torch.randn(512, 896), torch.distributions.StudentT(3.0).sample((512, 896))):
            packed = KernelWeight((weight * scale).bfloat16())
            assert packed.packed.dtype == torch.uint8
            assert packed.nbytes < 0.76 * weight.numel() * 2

    def test_all_16_codes_of_both_halves_of_a_unit_come_back(self) -> None:
        high = (torch.arange(320) + torch.arange(panel())[:, None]) % 16 * 7 + 2  # 16 bytes, whose numbers are finite
        words = high * 256 + torch.randint(256, high.shape)
        assert_numbers_come_back(words.short().view(torch.bfloat16))

    @pytest.mark.parametrize("exponent", [60, 120])
    def test_large_numbers(self, exponent: int) -> None:
        assert_exact((torch.randn(64, 256).double() * 2.0**exponent).bfloat16(), rows=(1, 40, 70))


def of_exponents(exponents: Tensor) -> Tensor:
    """Returns the bits of numbers with these exponents, of random signs and mantissas."""
    words = exponents * 128 + torch.randint(128, exponents.shape) - 2**15 * torch.randint(2, exponents.shape)
    return words.short()


class TestExponents:
    """Coding in 11 bits: numbers from 2 on, or whose exponent is not among the seven of their panel, are listed."""

    @pytest.fixture(autouse=True)
    def _with_tiles(self) -> None:
        if not codes_exponents():
            pytest.skip("exponents are coded with AMX only")

    @staticmethod
    def common(panels: int = 2, k: int = 512) -> tuple[Tensor, Tensor]:
        """Returns a weight of seven exponents, and the bits of its numbers."""
        words = of_exponents(96 + torch.randint(7, (panels * panel(), k)))
        return words.view(torch.bfloat16), words

    @pytest.mark.parametrize("spread", [*SPREADS, *DENSE_SPREADS])
    def test_products_are_exact(self, spread: str) -> None:
        weight, words = self.common(8)
        rare = (SPREADS | DENSE_SPREADS)[spread]
        words[rare] = of_exponents(130 + torch.randint(30, words[rare].shape))
        assert_exact(weight)
        assert_numbers_come_back(weight)

    @pytest.mark.parametrize("count", [*range(12), 63, 64, 65, 127, 128, 129])
    def test_the_list_may_end_anywhere(self, count: int) -> None:
        weight, words = self.common(1)
        words.view(-1)[torch.randperm(words.numel())[:count]] = 0x4242
        assert_exact(weight, rows=(1, 64))

    def test_a_weight_with_too_many_is_left_as_it_is(self) -> None:
        weight, words = self.common(3)
        most = words.numel() // PER_LISTED
        words.view(-1)[:most] = 0x4242
        words.view(-1)[most:] = of_exponents(torch.full((words.numel() - most,), 100))
        assert_exact(weight, rows=(1,))
        words.view(-1)[most] = 0x4242
        assert KernelWeight(weight).packed.dtype == torch.bfloat16

    def test_numbers_from_2_on_are_always_listed(self) -> None:
        weight, words = self.common(1)
        words[:] = of_exponents(torch.full(words.shape, 128))
        assert KernelWeight(weight).packed.dtype == torch.bfloat16
        words[: panel() - panel() // PER_LISTED] &= ~(1 << 14)
        assert_exact(weight, rows=(1,))

    @pytest.mark.parametrize("scale", [0.02, 0.03, 1.0])
    def test_numbers_that_models_have_take_few_bits(self, scale: float) -> None:
        for weight in (torch.randn(512, 896), torch.distributions.StudentT(3.0).sample((512, 896))):
            packed = KernelWeight((weight * scale).bfloat16())
            assert packed.packed.dtype == torch.uint8
            assert packed.nbytes < (11.5 if scale < 1 else 12.5) / 16 * weight.numel() * 2

    def test_every_code_comes_back_from_every_place(self) -> None:
        """Each of a unit's 512 positions has each of seven exponents, and one that is listed, in some unit."""
        numbers = torch.arange(panel() * 512)
        codes = (numbers + numbers // 512) % 8
        exponents = torch.where(codes < 7, codes * 17 + 3, 120 + numbers % 8)
        assert_numbers_come_back(of_exponents(exponents).view(panel(), 512).view(torch.bfloat16))


def test_other_rows_and_columns_than_it_has_are_refused() -> None:
    columns = 3 * panel()
    packed = KernelWeight(torch.randn(columns, 96).bfloat16()).packed
    for x, n in [
        (torch.randn(1, 64), columns),
        (torch.randn(1, 128), columns),
        (torch.randn(1, 96), columns - panel()),
        (torch.randn(1, 96), columns + 1),
    ]:
        with pytest.raises(RuntimeError, match="differ in size"):
            torch.ops.twostep.linear(x.bfloat16(), packed, None, n)
    with pytest.raises(RuntimeError, match="differ in size or dtype"):
        torch.ops.twostep.linear(torch.randn(1, 96), packed, None, columns)


def test_what_was_not_packed_so_is_refused() -> None:
    packed, x = KernelWeight(torch.randn(96, 96).bfloat16()).packed, torch.randn(1, 96).bfloat16()
    size = packed.shape[-1]
    shifted = torch.cat([packed.flatten(), torch.zeros(1, dtype=torch.uint8)])[1:].view_as(packed)
    with_gaps = packed.repeat_interleave(2, dim=-1)[..., ::2]
    parts = (packed[:0], packed[..., :64], packed[..., 64:], packed[..., : size - 64])
    for wrong in (*parts, packed.view(32, -1).T, shifted, with_gaps, packed.flatten()[:, None, None]):
        with pytest.raises(RuntimeError, match="differ in size"):
            torch.ops.twostep.linear(x, wrong, None, 96)
