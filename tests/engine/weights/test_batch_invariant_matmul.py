"""Torch's matmuls in fixed tiles: wide ones are used where they change no bit, and nowhere else."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.weights import batch_invariant_matmul
from engine.weights.batch_invariant_matmul import TILE_ROWS, WIDE_ROWS, BatchInvariantWeight

pytestmark = pytest.mark.usefixtures("two_threads")

TILE = TILE_ROWS["cpu"]
Matmul = Callable[[batch_invariant_matmul._TorchMatmul, Tensor, Tensor | None], Tensor]


@pytest.fixture(autouse=True)
def unprobed() -> Iterator[None]:
    """Forgets which shapes were probed, before and after each test."""
    batch_invariant_matmul._wide_rows.cache_clear()
    yield
    batch_invariant_matmul._wide_rows.cache_clear()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the number of rows of each matmul, one after the other."""
    numbers: list[int] = []
    plain: Matmul = batch_invariant_matmul._TorchMatmul.__call__

    def matmul(self: batch_invariant_matmul._TorchMatmul, rows: Tensor, bias: Tensor | None) -> Tensor:
        numbers.append(len(rows))
        return plain(self, rows, bias)

    monkeypatch.setattr(batch_invariant_matmul._TorchMatmul, "__call__", matmul)
    return numbers


def sums_otherwise(from_rows: int, with_bias: bool) -> Matmul:
    """Returns a matmul that sums the second half of K first, from `from_rows` rows on."""
    plain: Matmul = batch_invariant_matmul._TorchMatmul.__call__

    def matmul(self: batch_invariant_matmul._TorchMatmul, rows: Tensor, bias: Tensor | None) -> Tensor:
        if len(rows) < from_rows or (bias is not None) != with_bias:
            return plain(self, rows, bias)
        half = rows.shape[1] // 2
        x, w = rows.float(), self._weight.to_dense().float()
        parts = x[:, half:] @ w[:, half:].T, x[:, :half] @ w[:, :half].T
        return (parts[0] + parts[1] + (0 if bias is None else bias.float())).to(rows.dtype)

    return matmul


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
    monkeypatch.setattr(batch_invariant_matmul._TorchMatmul, "__call__", sums_otherwise(WIDE_ROWS, with_bias))
    weight, x, bias = torch.randn(n, k).to(dtype), torch.randn(WIDE_ROWS + 1, k).to(dtype), torch.randn(n).to(dtype)
    packed = BatchInvariantWeight(weight)
    whole = packed.multiply(x, bias)
    alone = torch.cat([packed.multiply(row[None], bias) for row in x])
    assert torch.equal(whole, alone)
    assert packed._wide_rows == TILE


def test_a_weight_too_large_to_probe_stays_with_narrow_tiles(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariant_matmul, "_MAX_PROBED_SIZE", 96 * 200 - 1)
    weight = BatchInvariantWeight(torch.randn(96, 200))
    assert seen == []
    weight.multiply(torch.randn(WIDE_ROWS, 200), None)
    assert seen == [TILE] * (WIDE_ROWS // TILE)


def test_layers_of_one_shape_are_probed_once(seen: list[int]) -> None:
    BatchInvariantWeight(torch.randn(96, 200))
    seen.clear()
    BatchInvariantWeight(torch.randn(96, 200))
    assert seen == []
