"""Torch's products in fixed tiles: wide ones are used where they change no bit, and nowhere else."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.weights import batch_invariant_matmul
from engine.weights.batch_invariant_matmul import TILE_ROWS, WIDE_ROWS, BatchInvariantWeight

pytestmark = pytest.mark.usefixtures("two_threads")

TILE = TILE_ROWS["cpu"]
Product = Callable[[batch_invariant_matmul._Product, Tensor, Tensor | None], Tensor]


@pytest.fixture(autouse=True)
def untried() -> Iterator[None]:
    batch_invariant_matmul._wide_rows.cache_clear()
    yield
    batch_invariant_matmul._wide_rows.cache_clear()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that were multiplied, one after the other."""
    numbers: list[int] = []
    plain: Product = batch_invariant_matmul._Product.__call__

    def product(self: batch_invariant_matmul._Product, rows: Tensor, bias: Tensor | None) -> Tensor:
        numbers.append(len(rows))
        return plain(self, rows, bias)

    monkeypatch.setattr(batch_invariant_matmul._Product, "__call__", product)
    return numbers


def sums_otherwise(from_rows: int, with_bias: bool) -> Product:
    """A library that sums the second half of K first, from so many rows on."""
    plain: Product = batch_invariant_matmul._Product.__call__

    def product(self: batch_invariant_matmul._Product, rows: Tensor, bias: Tensor | None) -> Tensor:
        if len(rows) < from_rows or (bias is not None) != with_bias:
            return plain(self, rows, bias)
        half = rows.shape[1] // 2
        x, w = rows.float(), self._weight.to_dense().float()
        parts = x[:, half:] @ w[:, half:].T, x[:, :half] @ w[:, :half].T
        return (parts[0] + parts[1] + (0 if bias is None else bias.float())).to(rows.dtype)

    return product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_multiplied_at_once(dtype: torch.dtype, seen: list[int]) -> None:
    weight = BatchInvariantWeight(torch.randn(96, 200).to(dtype))
    seen.clear()
    weight.multiply(torch.randn(2 * WIDE_ROWS + TILE + 1, 200).to(dtype), None)
    assert seen == [WIDE_ROWS, WIDE_ROWS, TILE, TILE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(96, 200), (1, 900), (300, 64)])
def test_another_order_of_sums_is_noticed(
    n: int, k: int, with_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_invariant_matmul._Product, "__call__", sums_otherwise(WIDE_ROWS, with_bias))
    weight, x, bias = torch.randn(n, k).to(dtype), torch.randn(WIDE_ROWS + 1, k).to(dtype), torch.randn(n).to(dtype)
    packed = BatchInvariantWeight(weight)
    whole = packed.multiply(x, bias)
    alone = torch.cat([packed.multiply(row[None], bias) for row in x])
    assert torch.equal(whole, alone)
    assert packed._wide_rows == TILE


def test_a_weight_too_large_to_try_stays_with_narrow_tiles(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariant_matmul, "_MOST_TRIED", 96 * 200 - 1)
    weight = BatchInvariantWeight(torch.randn(96, 200))
    assert seen == []
    weight.multiply(torch.randn(WIDE_ROWS, 200), None)
    assert seen == [TILE] * (WIDE_ROWS // TILE)


def test_layers_of_one_shape_are_tried_once(seen: list[int]) -> None:
    BatchInvariantWeight(torch.randn(96, 200))
    seen.clear()
    BatchInvariantWeight(torch.randn(96, 200))
    assert seen == []
