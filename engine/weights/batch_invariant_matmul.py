"""Torch's own matmul, made batch invariant: a row's result does not depend on the other rows or their number.

Torch's libraries choose the order of a sum by the number of rows and of threads. With both fixed (the last tile is
padded with zeros, a process keeps its number of threads), the order is fixed, too.
"""

import functools
from typing import cast

import torch
from torch import Tensor, nn

__all__ = ["TILE_ROWS", "WIDE_ROWS", "BatchInvariantWeight", "cancelling_operands"]

TILE_ROWS = {"cpu": 16, "cuda": 128}
"""Rows of one matmul, by device type. A GPU multiplies so many while it reads the weights, once per matmul."""
WIDE_ROWS = 512
"""Rows of one matmul where a probe finds the same bits as with TILE_ROWS."""
_MAX_PROBED_SIZE = 1 << 28  # numbers of a weight: larger ones make logits, which few rows need


class BatchInvariantWeight:
    """A `PackedWeight` that torch multiplies in fixed tiles, on any device, in any number format."""

    def __init__(self, weight: Tensor) -> None:  # [N, K]
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._matmul = _TorchMatmul(weight)
        self._tile_rows = TILE_ROWS[weight.device.type]
        self._wide_rows = _wide_rows(weight.shape, weight.dtype, weight.device, torch.get_num_threads())

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> x W^T + bias [T, N], in tiles of a fixed number of rows; see `PackedWeight.multiply`."""
        num_rows, tile_rows, wide_rows = x.shape[0], self._tile_rows, self._wide_rows
        num_padded = max(1, -(-num_rows // tile_rows)) * tile_rows
        padded = nn.functional.pad(x, (0, 0, 0, num_padded - num_rows)).contiguous()
        bias = None if bias is None else bias.contiguous()  # oneDNN ignores a bias's stride
        products, start = [], 0
        while start < num_padded:
            end = start + (wide_rows if start + wide_rows <= num_padded else tile_rows)
            products.append(self._matmul(padded[start:end], bias))
            start = end
        return (products[0] if len(products) == 1 else torch.cat(products))[:num_rows]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class _TorchMatmul:
    """One matmul by torch, rows [T, K] -> [T, N], with a weight [N, K] in the layout that its library prefers."""

    def __init__(self, weight: Tensor) -> None:
        self._is_prepacked = _can_prepack(weight)
        dense = weight.detach().contiguous()
        self._weight: Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(dense, TILE_ROWS["cpu"]) if self._is_prepacked else dense
        )

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if self._is_prepacked:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, self._weight, bias, "none", [], ""))
        return nn.functional.linear(rows, self._weight, bias)


def _can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN has a layout of its own for this weight.

    That is faster, and in float32 its results do not depend on the number of threads.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


@functools.cache
def _wide_rows(shape: torch.Size, dtype: torch.dtype, device: torch.device, num_threads: int) -> int:
    """Probes how many rows may be multiplied at once without a change of bits: WIDE_ROWS, or those of a tile.

    A probe suffices, because orders of sums depend on sizes and not on numbers.
    """
    tile_rows = TILE_ROWS[device.type]
    if shape.numel() > _MAX_PROBED_SIZE:
        return tile_rows
    rows, weight = cancelling_operands(WIDE_ROWS, shape, dtype, device)
    matmul = _TorchMatmul(weight)
    for bias in (None, matmul(rows[:tile_rows], None)[0]):  # a bias as small as what it is added to
        tiles = [matmul(rows[start : start + tile_rows], bias) for start in range(0, WIDE_ROWS, tile_rows)]
        if not torch.equal(matmul(rows, bias), torch.cat(tiles)):
            return tile_rows
    return WIDE_ROWS


def cancelling_operands(
    num_rows: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns rows [num_rows, K] and a weight [N, K] whose products all cancel out.

    All that is left in a result is the rounding error of its sum, which differs in any other order of summation.
    """
    num_out, num_in = shape
    half = num_in // 2
    order = torch.randperm(num_in, device=device)
    rows = torch.ones(num_rows, num_in, dtype=dtype, device=device)
    weight = torch.zeros(num_out, num_in, dtype=dtype, device=device)
    weight[:, :half].uniform_(-1, 1)
    weight[:, half : 2 * half] = -weight[:, :half]
    rows[:, :half].uniform_(-1, 1)
    rows[:, half : 2 * half] = rows[:, :half]
    return rows[:, order], weight[:, order]
