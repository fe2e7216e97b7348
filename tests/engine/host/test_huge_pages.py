"""Tensors in huge pages behave like any other tensors."""

import pytest
import torch

from engine.host.huge_pages import empty_in_huge_pages
from tests.resident_memory import resident_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(3, 5), (1000, 2, 16, 64), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor, numbers = empty_in_huge_pages(shape, dtype, CPU), torch.randn(shape).to(dtype)
    tensor.copy_(numbers)
    assert tensor.is_contiguous() and torch.equal(tensor, numbers)


def test_only_what_is_written_takes_memory_and_all_of_it_is_given_back() -> None:
    before = resident_bytes()
    tensor = empty_in_huge_pages((256, 1 << 18), torch.float32, CPU)
    assert resident_bytes() < before + 20e6
    tensor[:200] = 1
    assert resident_bytes() > before + 200e6
    del tensor
    assert resident_bytes() < before + 20e6


def test_other_devices_have_pages_of_their_own() -> None:
    tensor = empty_in_huge_pages((2, 3), torch.float32, torch.device("meta"))
    assert tensor.is_meta and tensor.shape == (2, 3)
