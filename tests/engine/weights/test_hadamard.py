"""The Hadamard transform: products stay what they were, and nothing that is regular is gathered in one number."""

import pytest
import torch

from engine.kernels import load_kernels
from engine.weights.hadamard import SMALLEST_HEAD_BLOCK, inverse_transform, transform, undo

SIZES = [1, 63, 64, 65, 128, 192, 256, 300, 448, 1000]


@pytest.mark.parametrize("size", SIZES)
def test_products_of_transformed_numbers_are_those_of_the_numbers(size: int) -> None:
    x, weight = torch.randn(4, size, dtype=torch.float32), torch.randn(5, size)
    product = transform(x).double() @ inverse_transform(weight).double().T
    torch.testing.assert_close(product, x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "expected"), [(10, 64), (64, 64), (65, 128), (300, 320)])
def test_rows_are_padded_to_a_whole_block(size: int, expected: int) -> None:
    assert transform(torch.randn(2, size)).shape == inverse_transform(torch.randn(2, size)).shape == (2, expected)


@pytest.mark.parametrize("size", [16, 48, 80, 112, 128, 240, 512])
def test_heads_need_no_padding_and_become_what_they_were(size: int) -> None:
    x = torch.randn(3, size)
    transformed = transform(x, SMALLEST_HEAD_BLOCK)
    assert transformed.shape == x.shape
    torch.testing.assert_close(undo(transformed, SMALLEST_HEAD_BLOCK), x, rtol=1e-5, atol=1e-6)


def test_a_number_is_spread_over_its_block_and_no_other() -> None:
    for place, block in [(0, slice(256)), (255, slice(256)), (256, slice(256, 384)), (390, slice(384, 448))]:
        row = torch.zeros(1, 448)
        row[0, place] = 3
        spread = transform(row)[0]
        assert spread[block].abs().eq(3).all() and spread.count_nonzero() == len(spread[block])


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("period", [1, 2, 4, 32])
def test_what_repeats_is_spread_evenly(size: int, period: int) -> None:
    """Without flipped signs, equal or alternating numbers would add up in one sum and leave zeros in all others."""
    row = torch.where(torch.arange(size) // period % 2 == 0, 1.0, -1.0)[None]
    assert transform(row).abs().eq(size**0.5).all() and transform(torch.ones(1, size)).abs().eq(size**0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_transforms_weights_to_the_same_bits(size: int, dtype: torch.dtype) -> None:
    load_kernels() or pytest.skip("no kernels on this machine")
    weight = torch.randn(3, size).to(dtype)
    assert torch.equal(torch.ops.twostep.inverse_hadamard(weight), inverse_transform(weight))
    assert torch.equal(torch.ops.twostep.inverse_hadamard(weight.T.contiguous().T), inverse_transform(weight))


def test_what_the_kernel_cannot_transform_is_refused() -> None:
    load_kernels() or pytest.skip("no kernels on this machine")
    for weight, reason in [(torch.randn(3), "matrix"), (torch.randn(3, 3).half(), "float32 or bfloat16")]:
        with pytest.raises(RuntimeError, match=reason):
            torch.ops.twostep.inverse_hadamard(weight)
