"""How published precisions store a matrix, written from their definitions and not from the code that reads them."""

import json
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "AWQ_ORDER",
    "FP4_LEVELS",
    "NF4_LEVELS",
    "Store",
    "Stored",
    "awq",
    "bits_of_4",
    "compressed",
    "fp4_numbers",
    "fp8",
    "fp8_blocks",
    "gptq",
    "int8",
    "mxfp4_experts",
    "mxfp4_matrix",
    "nearest_fp4",
    "nvfp4",
    "quark_integers",
]

Stored = tuple[dict[str, Tensor], np.ndarray]
"""Tensors by the last part of their names, and the numbers [N, K] that they stand for, in float64."""
Store = Callable[[np.ndarray], Stored]
"""Stores a weight [N, K] in float32."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column in each place of a word."""
FP4_LEVELS = (
    *(0.0, 0.005208333333333333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25),
    *(-0.0, -0.005208333333333333, -2 / 3, -1.0, -1 / 3, -0.5, -1 / 6, -0.25),
)
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_E2M1_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_LARGEST_E4M3 = 448


def _e4m3(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.clip(numbers, -_LARGEST_E4M3, _LARGEST_E4M3)).to(torch.float8_e4m3fn)


def fp8_blocks(name: str, size: int, has_powers: bool = False) -> Store:
    """E4M3 with scales in float32 for blocks of `size` rows and columns, which may be powers of two."""

    def store(weight: np.ndarray) -> Stored:
        rows, columns = (np.arange(0, length, size) for length in weight.shape)
        scales = np.maximum.reduceat(np.maximum.reduceat(np.abs(weight), rows, 0), columns, 1) / np.float32(448)
        scales = 2 ** np.ceil(np.log2(scales)) if has_powers else scales
        wide = scales.repeat(size, 0).repeat(size, 1)[: weight.shape[0], : weight.shape[1]]
        numbers = _e4m3(weight / wide)
        tensors = {"weight": numbers, name: torch.from_numpy(scales)}
        return tensors, numbers.double().numpy() * wide.astype(np.float64)

    return store


def fp8(name: str, shape: tuple[int, ...]) -> Store:
    """E4M3 with scales in bfloat16 of that shape, in which 0 stands for the number of rows."""

    def store(weight: np.ndarray) -> Stored:
        largest = np.abs(weight).max(1 if 0 in shape else None)
        scales = (
            torch.tensor(largest / np.float32(_LARGEST_E4M3)).bfloat16().view([size or len(weight) for size in shape])
        )
        wide = scales.double().numpy().reshape(-1, 1)
        numbers = _e4m3(weight / wide)
        return {"weight": numbers, name: scales}, numbers.double().numpy() * wide

    return store


def _codes(
    weight: np.ndarray, bits: int, group: int, is_symmetric: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes [N, K], and scales and zeros [N, G] of groups, of which the last may be smaller."""
    starts = np.arange(0, weight.shape[1], group)
    low, high = np.minimum.reduceat(weight, starts, 1), np.maximum.reduceat(weight, starts, 1)
    top = (1 << bits) - 1
    if is_symmetric:
        high = np.maximum(-low, high)
        low = -high
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.full(scales.shape, 1 << (bits - 1)) if is_symmetric else np.clip(np.round(-low / scales), 1, top)
    groups = np.arange(weight.shape[1]) // group
    codes = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, top)
    return codes.astype(np.int64), scales, zeros.astype(np.int64)


def _words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Returns codes [R, C] as words [R, C * bits / 32]; place i of a word has the column `order[i]` of its columns."""
    each = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each)))
    parts = padded.reshape(len(codes), -1, each).astype(np.uint64)
    words = sum(parts[:, :, column] << np.uint64(bits * place) for place, column in enumerate(order or range(each)))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def _numbers(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: int) -> np.ndarray:
    groups = np.arange(codes.shape[1]) // group
    numbers: np.ndarray = (codes - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
    return numbers


def gptq(bits: int, group: int, has_order: bool, stored_zero: int) -> Store:
    """Integers in groups of columns, with `has_order` of columns in another order; zeros are stored less
    `stored_zero`."""

    def store(weight: np.ndarray) -> Stored:
        columns = np.arange(weight.shape[1])
        order = np.random.default_rng(2).permutation(columns) if has_order else columns
        back = np.argsort(order)
        codes, scales, zeros = _codes(weight[:, order], bits, group)
        tensors = {
            "qweight": _words(codes[:, back], bits).t(),
            "qzeros": _words((zeros - stored_zero).T, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy((back // group).astype(np.int32)),
        }
        return tensors, np.ascontiguousarray(_numbers(codes, scales, zeros, group)[:, back])

    return store


def awq(group: int) -> Store:
    def store(weight: np.ndarray) -> Stored:
        codes, scales, zeros = _codes(weight, 4, group)
        tensors = {"qweight": _words(codes.T, 4, AWQ_ORDER), "qzeros": _words(zeros.T, 4, AWQ_ORDER)}
        tensors["scales"] = torch.from_numpy(scales.T.copy())
        return tensors, _numbers(codes, scales, zeros, group)

    return store


def quark_integers(group: int, sign: int, order: tuple[int, ...]) -> Store:
    """Integers of 4 bits, whose highest bit `sign` inverts, if it is one."""

    def store(weight: np.ndarray) -> Stored:
        codes, scales, zeros = _codes(weight, 4, group)
        tensors = {"weight": _words(codes.T ^ sign, 4, order), "weight_zero_point": _words(zeros.T ^ sign, 4, order)}
        tensors["weight_scale"] = torch.from_numpy(scales.T.astype(np.float32))
        return tensors, _numbers(codes, scales, zeros, group)

    return store


def compressed(bits: int, group: int, is_symmetric: bool) -> Store:
    """Integers as compressed-tensors packs them."""

    def store(weight: np.ndarray) -> Stored:
        codes, scales, zeros = _codes(weight, bits, group, is_symmetric)
        tensors = {
            "weight_packed": _words(codes, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = _words(zeros.T, bits).t()
        return tensors, _numbers(codes, scales, zeros, group)

    return store


def int8(scale: str, unit: float) -> Store:
    """Integers of 8 bits with a scale for each row, which is stored in units of `unit`."""

    def store(weight: np.ndarray) -> Stored:
        largest = np.abs(weight).max(1, keepdims=True).astype(np.float32)
        codes = np.round(weight / largest * 127).astype(np.int8)
        scales = torch.from_numpy(largest / 127 / np.float32(unit))
        tensors = {"weight": torch.from_numpy(codes), scale: scales.flatten() if scale == "SCB" else scales}
        return tensors, codes * scales.double().numpy() * unit

    return store


def nearest_fp4(numbers: np.ndarray) -> np.ndarray:
    """Returns the codes of the nearest numbers in E2M1."""
    middles = (_E2M1_LEVELS[1:] + _E2M1_LEVELS[:-1]) / 2
    codes: np.ndarray = np.searchsorted(middles, np.abs(numbers)) | (numbers < 0) * 8
    return codes


def fp4_numbers(codes: np.ndarray) -> np.ndarray:
    """Returns the numbers in E2M1 that codes stand for."""
    levels: np.ndarray = _E2M1_LEVELS[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    return levels


def _pairs(codes: np.ndarray) -> np.ndarray:
    pairs: np.ndarray = codes[..., ::2] | codes[..., 1::2] << 4
    return pairs.astype(np.uint8)


def _mxfp4(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns bytes [..., G, 16], exponents [..., G] and numbers [..., K] of rows [..., K]."""
    groups = rows.reshape(*rows.shape[:-1], -1, 32).astype(np.float64)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(np.int64) - 2
    powers = 2.0 ** exponents[..., None]
    codes = nearest_fp4(groups / powers)
    return _pairs(codes), (exponents + 127).astype(np.uint8), (fp4_numbers(codes) * powers).reshape(rows.shape)


def mxfp4_experts(weight: np.ndarray) -> Stored:
    """Stores experts, [E, K, N] in transformers."""
    packed, exponents, numbers = _mxfp4(np.swapaxes(weight, 1, 2))
    tensors = {"_blocks": torch.from_numpy(packed), "_scales": torch.from_numpy(exponents)}
    return tensors, np.ascontiguousarray(np.swapaxes(numbers, 1, 2))


def mxfp4_matrix(weight: np.ndarray) -> Stored:
    packed, exponents, numbers = _mxfp4(weight)
    tensors = {"weight": torch.from_numpy(packed).flatten(1), "weight_scale": torch.from_numpy(exponents)}
    return tensors, numbers


def nvfp4(names: tuple[str, str, str, str], has_divisor: bool) -> Store:
    """E2M1 in groups of 16: bytes, scales, the factor of the tensor, or its reciprocal, and that of activations under
    these names."""

    def store(weight: np.ndarray) -> Stored:
        groups = weight.reshape(len(weight), -1, 16).astype(np.float64)
        factor = np.float32(np.abs(weight).max() / (6 * _LARGEST_E4M3))
        last = np.float32(1 / factor) if has_divisor else factor
        exact = 1 / np.float64(last) if has_divisor else np.float64(last)
        scales = _e4m3(np.abs(groups).max(2) / 6 / exact)
        wide = scales.double().numpy()[..., None] * exact
        codes = nearest_fp4(groups / wide)
        packed = torch.from_numpy(_pairs(codes.reshape(weight.shape)))
        factors = torch.tensor([[last], [9.0]] if has_divisor else [last, 9.0])
        tensors = dict(zip(names, (packed, scales, *factors), strict=True))
        return tensors, (fp4_numbers(codes) * wide).reshape(weight.shape)

    return store


def bits_of_4(kind: str, levels: tuple[float, ...], block: int, is_nested: bool) -> Store:
    """Codes of these levels as bitsandbytes stores them, `kind` being nf4 or fp4, with scales for blocks, which may be
    quantized themselves."""

    def store(weight: np.ndarray) -> Stored:
        table = np.array(levels, np.float32)
        flat = weight.reshape(-1, block)
        scales = np.abs(flat).max(1).astype(np.float32)
        state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [*weight.shape]}
        tensors = {"weight.absmax": torch.from_numpy(scales)}
        if is_nested:
            tensors, scales, offset = _nested(scales)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = np.abs((flat / scales[:, None])[..., None] - table).argmin(2)
        pairs = codes.reshape(-1, 2)
        tensors |= {
            "weight": torch.from_numpy((pairs[:, :1] << 4 | pairs[:, 1:]).astype(np.uint8)),
            "weight.quant_map": torch.from_numpy(table),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
        }
        return tensors, (table.astype(np.float64)[codes] * scales[:, None]).reshape(weight.shape)

    return store


def _nested(scales: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray, float]:
    """Returns tensors of scales of 8 bits, the scales that they stand for in float64, and what is added to each."""
    offset = float(scales.mean())
    table = np.linspace(-1, 1, 256, dtype=np.float32)
    factors = np.maximum.reduceat(np.abs(scales - offset), np.arange(0, len(scales), 256)).astype(np.float32)
    wide = factors.repeat(256)[: len(scales)]
    codes = np.abs(((scales - offset) / wide)[:, None] - table).argmin(1)
    tensors = {
        "weight.absmax": torch.from_numpy(codes.astype(np.uint8)),
        "weight.nested_quant_map": torch.from_numpy(table),
        "weight.nested_absmax": torch.from_numpy(factors),
    }
    return tensors, table[codes].astype(np.float64) * wide + offset, offset
