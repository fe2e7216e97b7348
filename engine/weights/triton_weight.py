"""A weight for the product in Triton (`engine.kernels.cuda.linear`). Imported only where the device is a GPU."""

import torch
from torch import Tensor, nn

from engine.checkpoint.stored_tensor import dense
from engine.kernels.cuda.linear import Coding, Rows, Tile, linear, linear_in_segments, sum_order, tile_for
from engine.kernels.cuda.shared_memory import shared_bytes
from engine.weights.segment_sums import SegmentSums

__all__ = ["TritonWeight"]


class TritonWeight:
    """A `PackedWeight` row by row, each filled up to whole steps of its product. Its rows are numbers or codes.

    The order of its sums is that of the whole matrix, if this is one rank's part of it, so that a part has the same
    bits. Its tiles are chosen for the part, and change none.
    """

    rows: Tensor
    """Numbers [N, K and what fills up], or their codes."""
    coding: Coding | None = None

    def __init__(self, weight: Tensor, num_columns: int | None = None) -> None:
        """`weight` [N, K] is in a number format of `DTYPES`, and has some of the rows of a matrix with `num_columns` of
        them, by default all."""
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        num_out, num_in = weight.shape
        self.order = sum_order(num_columns or num_out, num_in, self._code_dtype)
        self.num_missing = -num_in % self.order.block_k
        self._num_segments = self.order.num_segments(num_in)
        self._shared_bytes, self._is_hopper = shared_bytes(weight.device), _is_hopper(weight.device)
        rows = self._stored(dense(weight.detach()))
        is_view = num_columns is not None and rows.untyped_storage().nbytes() > rows.nbytes
        self.rows = rows.clone() if is_view else rows  # of a matrix whose other rows nobody keeps

    @property
    def _code_dtype(self) -> torch.dtype:
        """Number format of the numbers or of their codes: see `sum_order`."""
        return self.dtype

    def _stored(self, weight: Tensor) -> Tensor:
        """Returns the rows that are kept."""
        return _filled_up(weight, self.num_missing)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> x W^T + bias [T, N]; see `PackedWeight.multiply`. Does not wait for the GPU."""
        bias = None if bias is None else bias.contiguous()
        return linear(self.taken(x), self.rows, bias, self.order, self._tile(len(x)), self.coding)

    def multiply_in_segments(self, x: Tensor, bias: Tensor | None) -> Tensor | SegmentSums:
        """Multiplies as `multiply` does, but where segments are summed apart, the caller is to add them."""
        bias = None if bias is None else bias.contiguous()
        product = linear_in_segments(self.taken(x), self.rows, bias, self.order, self._tile(len(x)), self.coding)
        return product if product.dim() == 2 else SegmentSums(product, bias)

    def taken(self, x: Tensor) -> Rows:
        """Returns rows x [T, K] as the product takes them."""
        self._check(x)
        return Rows(_filled_up(x, self.num_missing), x.dtype)

    def _check(self, x: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.shape[1] or x.dtype != self.dtype:
            raise RuntimeError(f"rows {[*x.shape]} in {x.dtype} do not fit a weight {[*self.shape]} in {self.dtype}")

    def _tile(self, num_rows: int) -> Tile:
        weight = self.shape[0], self._num_segments, self.dtype
        return tile_for(num_rows, *weight, self._shared_bytes, self.coding, self._is_hopper)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.coding is None else self.coding.scales.nbytes)


def _filled_up(rows: Tensor, num_missing: int) -> Tensor:
    """Returns rows as a product takes them: with so many zeros more, at multiples of 16 bytes."""
    if num_missing:
        return nn.functional.pad(rows, (0, num_missing))
    are_aligned = rows.stride(1) == 1 and (rows.stride(0) * rows.itemsize | rows.data_ptr()) % 16 == 0
    return rows if are_aligned else rows.clone(memory_format=torch.contiguous_format)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
