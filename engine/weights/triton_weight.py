"""A dense weight for the product in Triton (`engine.kernels.cuda.linear`). Imported only where the device is a GPU."""

from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.cuda.linear import Tile, linear, linear_in_segments, sum_order, tile_for
from engine.weights.segment_sums import SegmentSums

__all__ = ["TritonWeight", "filled_up"]

_SHARED_BYTES = 99 << 10  # of the smallest supported GPU, for where there is none


class TritonWeight:
    """A `PackedWeight` row by row, each filled up with zeros to whole steps of its product."""

    def __init__(self, weight: Tensor) -> None:  # [N, K], in a number format of `DTYPES`
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        num_out, num_in = weight.shape
        self.order = sum_order(num_out, num_in, weight.dtype)
        self.num_missing = -num_in % self.order.block_k
        self.rows = filled_up(weight.detach(), self.num_missing)
        self._num_segments = self.order.num_segments(num_in)
        self._shared_bytes = _shared_bytes(weight.device)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> x W^T + bias [T, N]; see `PackedWeight.multiply`. Does not wait for the GPU."""
        rows, tile = self._rows_and_tile(x)
        return linear(rows, self.rows, None if bias is None else bias.contiguous(), self.order, tile)

    def multiply_in_segments(self, x: Tensor, bias: Tensor | None) -> Tensor | SegmentSums:
        """As `multiply`, but where segments are summed apart, the caller is to add them."""
        rows, tile = self._rows_and_tile(x)
        bias = None if bias is None else bias.contiguous()
        product = linear_in_segments(rows, self.rows, bias, self.order, tile)
        return product if product.dim() == 2 else SegmentSums(product, bias)

    def _rows_and_tile(self, x: Tensor) -> tuple[Tensor, Tile]:
        if x.dim() != 2 or x.shape[1] != self.shape[1] or x.dtype != self.dtype:
            raise RuntimeError(f"rows {[*x.shape]} in {x.dtype} do not fit a weight {[*self.shape]} in {self.dtype}")
        tile = tile_for(x.shape[0], self.shape[0], self._num_segments, self.dtype, self._shared_bytes)
        return filled_up(x, self.num_missing), tile

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


def filled_up(rows: Tensor, num_missing: int) -> Tensor:
    """Returns rows as a product takes them: with so many zeros more, at multiples of 16 bytes."""
    if num_missing:
        return nn.functional.pad(rows, (0, num_missing))
    are_aligned = rows.stride(1) == 1 and (rows.stride(0) * rows.itemsize | rows.data_ptr()) % 16 == 0
    return rows if are_aligned else rows.clone(memory_format=torch.contiguous_format)


def _shared_bytes(device: torch.device) -> int:
    """Returns how much shared memory a program may have."""
    if device.type != "cuda":
        return _SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
