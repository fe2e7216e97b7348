"""Torch's own matrix product, made the same for a row whatever the other rows are and however many.

Torch's libraries choose the order of a sum by the number of rows and of threads. With both fixed (the last tile is
filled up with zeros, a process keeps its number of threads), the order is fixed, too.
"""

import functools
from typing import cast

import torch
from torch import Tensor, nn

__all__ = ["TILE_ROWS", "WIDE_ROWS", "BatchInvariantWeight"]

TILE_ROWS = {"cpu": 16, "cuda": 128}
"""Rows of a product. A GPU multiplies so many while it reads the weights, which it does once for each product."""
WIDE_ROWS = 512
"""Rows of a product where a row has the same bits in it as in one of TILE_ROWS."""
_MOST_TRIED = 1 << 28  # numbers of a weight: larger ones make logits, which few rows ask for


class BatchInvariantWeight:
    """Multiplies on any device, in any number format."""

    def __init__(self, weight: Tensor) -> None:  # [N, K]
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._product = _Product(weight)
        self._tile_rows = TILE_ROWS[weight.device.type]
        self._wide_rows = _wide_rows(weight.shape, weight.dtype, weight.device, torch.get_num_threads())

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """As `PackedWeight.multiply`."""
        num_rows, tile_rows, wide_rows = x.shape[0], self._tile_rows, self._wide_rows
        num_padded = max(1, -(-num_rows // tile_rows)) * tile_rows
        padded = nn.functional.pad(x, (0, 0, 0, num_padded - num_rows)).contiguous()
        bias = None if bias is None else bias.contiguous()  # oneDNN takes no notice of a bias's stride
        products, start = [], 0
        while start < num_padded:
            end = start + (wide_rows if start + wide_rows <= num_padded else tile_rows)
            products.append(self._product(padded[start:end], bias))
            start = end
        return (products[0] if len(products) == 1 else torch.cat(products))[:num_rows]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class _Product:
    """Rows [T, K] -> [T, N], for a weight [N, K] in the layout that its library likes."""

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
    """Whether oneDNN has a layout of its own for this weight: faster, and in float32 free of the thread count."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


@functools.cache
def _wide_rows(shape: torch.Size, dtype: torch.dtype, device: torch.device, num_threads: int) -> int:
    """How many rows may be multiplied at once: tried, because orders of sums depend on sizes and not on numbers."""
    tile_rows = TILE_ROWS[device.type]
    if shape.numel() > _MOST_TRIED:
        return tile_rows
    rows, weight = _nothing_but_noise(WIDE_ROWS, shape, dtype, device)
    product = _Product(weight)
    for bias in (None, product(rows[:tile_rows], None)[0]):  # one as small as what it is added to
        tiles = [product(rows[start : start + tile_rows], bias) for start in range(0, WIDE_ROWS, tile_rows)]
        if not torch.equal(product(rows, bias), torch.cat(tiles)):
            return tile_rows
    return WIDE_ROWS


def _nothing_but_noise(
    num_rows: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows [num_rows, K] and a weight [N, K] whose products all cancel out: what is left of them is the rounding of
    their sums, which is another one in any other order."""
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
