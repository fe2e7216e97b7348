"""How published methods round the rows that weights multiply, where they do: twostep does not."""

import torch
from torch import Tensor

from benchmarks.formats.definitions import fp4_numbers, nearest_fp4
from benchmarks.formats.llama import Rounding

__all__ = ["e2m1_rows", "e4m3_rows", "e4m3_tensor", "int8_rows", "int8_rows_but_outliers"]


def _e4m3(numbers: Tensor) -> Tensor:
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).double()


def e4m3_tensor(rows: Tensor) -> Tensor:
    """One scale for all rows, which a file would have from other texts."""
    scale = rows.abs().max() / 448
    return _e4m3(rows / scale) * scale


def e4m3_rows(group: int | None = None) -> Rounding:
    """A scale for each row, or for each group of its columns."""

    def rounded(rows: Tensor) -> Tensor:
        groups = rows.view(len(rows), -1, group or rows.shape[1])
        scales = groups.abs().amax(-1, keepdim=True) / 448
        return (_e4m3(groups / scales) * scales).view_as(rows)

    return rounded


def int8_rows(rows: Tensor) -> Tensor:
    scales = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scales).round() * scales


def int8_rows_but_outliers(rows: Tensor) -> Tensor:
    """Rounds as LLM.int8() does: columns with a number beyond 6 stay in 16 bits."""
    is_outlier = rows.abs().amax(0) > 6
    return torch.where(is_outlier, rows.half().double(), int8_rows(rows.masked_fill(is_outlier, 0)))


def e2m1_rows(rows: Tensor) -> Tensor:
    """NVFP4: a scale in E4M3 for each 16 columns, and a factor for all rows."""
    groups = rows.view(len(rows), -1, 16)
    factor = rows.abs().max() / (6 * 448)
    scales = _e4m3(groups.abs().amax(-1, keepdim=True) / 6 / factor) * factor
    codes = nearest_fp4((groups / scales.clamp_min(1e-30)).numpy())
    return (torch.from_numpy(fp4_numbers(codes)) * scales).view_as(rows)
