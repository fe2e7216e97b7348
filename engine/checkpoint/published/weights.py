"""The weights of a checkpoint in a published precision: tensor -> weight, as the file stores it.

Of each weight the tensors say how it is stored, and the scheme of config.json what they mean. So layers that a scheme
leaves out need no list: they are plain tensors.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.published.codecs import LookedUp, MxFp4, NvFp4, PackedIntegers, Scaled, packed, unpacked
from engine.checkpoint.published.scheme import is_nvfp4, quark_weights
from engine.checkpoint.safetensors_files import open_all
from engine.checkpoint.stored_tensor import Codec, StoredRows, StoredTensor
from engine.core.errors import ModelError, UnsupportedModelError

__all__ = ["published_weights"]

Tensors = dict[str, Tensor]
Scheme = Mapping[str, Any]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight columns that follow one another."""
_INT8_UNIT = 7.874015718698502e-3  # 1 / 127, as bitsandbytes has it
_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale", "output_zero_point"),
    *("q_scale", "k_scale", "v_scale", "kv_scale"),
)
"""Last parts of names of tensors that only those read who round activations, keys or values."""
_TABLES = (".tid2eid",)
"""Last parts of names of tensors that are integers."""


def published_weights(folder: Path, scheme: Scheme, dtype: torch.dtype) -> Tensors:
    """Returns the checkpoint's tensors, the quantized ones in one for each weight, which is read in `dtype`. Files stay
    mapped as long as there are any of these. Raises ModelError."""
    tensors = open_all(folder)
    method = str(scheme.get("quant_method", "bitsandbytes"))
    take = _METHODS[method]
    weights: Tensors = {}
    try:
        for name in sorted(tensors):
            if name in tensors and (found := take(name, tensors, scheme)) is not None:
                weights[found[0]] = StoredTensor([found[1]], found[2], dtype, is_transposed=found[3])
    except (KeyError, ValueError, IndexError, RuntimeError, TypeError) as error:
        raise ModelError(f"The weights of {folder} are not as {method} stores them, at {name}: {error}.") from error
    left = {name: tensor for name, tensor in tensors.items() if not name.endswith(_ACTIVATIONS)}
    for name, tensor in left.items():
        if tensor.dtype.itemsize == 1 or not (tensor.dtype.is_floating_point or name.endswith(_TABLES)):
            raise UnsupportedModelError(
                f"The weights of {folder} are quantized ({method}), and of {name} it is not known what it stands for."
            )
    return {**left, **weights}


Found = tuple[str, StoredRows, tuple[int, ...], bool]
"""Name of a weight, its rows, their shape, and whether the model has it transposed."""


def _matrix(name: str, codec: Codec, *parts: Tensor, columns: int) -> Found:
    """Returns a matrix of the parts' rows. Raises ValueError unless all have as many."""
    if len({len(part) for part in parts}) != 1:
        raise ValueError(f"its parts have {[len(part) for part in parts]} rows")
    return name, StoredRows(codec, parts), (len(parts[0]), columns), False


def _scaled(name: str, tensors: Tensors, scales: str, zeros: str | None = None, block: Sequence[int] = (1, 0)) -> Found:
    """Takes a weight of 8 bits, with scales for its tensor or its rows, or for blocks [rows, columns] of it."""
    numbers = tensors.pop(name)
    parts = [_of_rows(tensors.pop(each), len(numbers), block[0]) for each in (scales, zeros) if each in tensors]
    size = numbers.shape[1] if parts[0].shape[1] == 1 else block[1]
    _check_groups(numbers.shape[1], size, parts[0].shape[1])
    return _matrix(name, Scaled(size), numbers, *parts, columns=numbers.shape[1])


def _check_groups(columns: int, size: int, count: int) -> None:
    if size < 1 or -(-columns // size) != count:
        raise ValueError(f"{count} groups of {size} do not make {columns} columns")


def _of_rows(values: Tensor, num_rows: int, block_rows: int) -> Tensor:
    """Returns scales or zeros for each row: [num_rows, G]."""
    values = values.float() if values.dtype is torch.float8_e8m0fnu else values
    if values.numel() == 1:
        return values.float().reshape(1, 1).expand(num_rows, 1)
    if values.dim() == 1:
        values = values[:, None]
    if len(values) != -(-num_rows // block_rows):
        raise ValueError(f"{len(values)} rows of scales do not fit {num_rows} of numbers")
    return values.repeat_interleave(block_rows, dim=0)[:num_rows] if block_rows > 1 else values


def _take_fp8(name: str, tensors: Tensors, scheme: Scheme) -> Found | None:
    names = f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('weight')}scale"
    scales = next((each for each in names if each in tensors), None)
    if scales is not None and (tensors[name].dtype, tensors[scales].dtype) == (torch.int8, torch.float8_e8m0fnu):
        return _fp4(name, tensors.pop(name), tensors.pop(scales))
    if tensors[name].dtype is not torch.float8_e4m3fn or scales is None:
        return None
    return _scaled(name, tensors, scales, block=scheme.get("weight_block_size") or (1, 0))


def _fp4(name: str, packed: Tensor, powers: Tensor) -> Found:
    """Takes bytes [N, K / 2] and powers of two [N, K / 32]."""
    _check_groups(packed.shape[1], 16, powers.shape[1])
    parts = packed.view(torch.uint8).view(*powers.shape, 16), powers.view(torch.uint8)
    return _matrix(name, MxFp4(), *parts, columns=2 * packed.shape[1])


def _take_mxfp4(name: str, tensors: Tensors, scheme: Scheme) -> Found | None:
    stem = name.removesuffix("_blocks")
    if stem == name:
        return None
    blocks, exponents = tensors.pop(name), tensors.pop(f"{stem}_scales")
    if blocks.dim() != 4 or blocks.shape[3] != 16 or exponents.shape != blocks.shape[:3]:
        raise ValueError(f"it has the shape {[*blocks.shape]}")
    num_experts, num_rows, num_groups, _ = blocks.shape
    rows = StoredRows(MxFp4(), (blocks.flatten(0, 1), exponents.flatten(0, 1)))
    return stem, rows, (num_experts, num_rows, 32 * num_groups), True


def _take_gptq(name: str, tensors: Tensors, scheme: Scheme) -> Found | None:
    stem = name.removesuffix("qweight")
    if stem == name:
        return None
    bits, words = int(scheme["bits"]), tensors.pop(name).t()  # [N, K / numbers of a word]
    zeros = unpacked(tensors.pop(f"{stem}qzeros"), bits).t()
    if scheme.get("checkpoint_format", "gptq") == "gptq":
        zeros = zeros + 1  # it stores one less
    return _packed_integers(stem, tensors, scheme, bits, words, zeros)


def _packed_integers(stem: str, tensors: Tensors, scheme: Scheme, bits: int, words: Tensor, zeros: Tensor) -> Found:
    """Takes words [N, W] and zeros [N, G] with their scales [G, N], and the order of groups."""
    columns = words.shape[1] * 32 // bits
    scales = tensors.pop(f"{stem}scales").t()
    if scales.shape != zeros.shape:
        raise ValueError(f"{[*scales.shape]} scales have {[*zeros.shape]} zeros")
    codec = _integer_codec(bits, columns, scales.shape[1], scheme, tensors.pop(f"{stem}g_idx", None))
    return _matrix(f"{stem}weight", codec, words, scales, zeros, columns=columns)


def _integer_codec(bits: int, columns: int, num_groups: int, scheme: Scheme, groups: Tensor | None) -> PackedIntegers:
    """Returns the codec of columns in groups of the scheme's size, or in those that the file lists."""
    size = int(scheme.get("group_size") or -1)
    size = columns if size < 1 or num_groups == 1 else size
    if groups is None or torch.equal(groups.long(), torch.arange(columns) // size):
        _check_groups(columns, size, num_groups)
        return PackedIntegers(bits, size, columns)
    if groups.shape != (columns,) or int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise ValueError("its columns are in groups that are not there")
    return PackedIntegers(bits, size, columns, groups.long())


def _take_awq(name: str, tensors: Tensors, scheme: Scheme) -> Found | None:
    stem = name.removesuffix("qweight")
    if stem == name:
        return None
    words = packed(_awq_codes(tensors.pop(name)).t().contiguous(), 4)
    return _packed_integers(stem, tensors, scheme, 4, words, _awq_codes(tensors.pop(f"{stem}qzeros")).t())


def _awq_codes(words: Tensor) -> Tensor:
    """Returns the codes [R, N] of words [R, N / 8]."""
    codes = unpacked(words, 4).view(len(words), -1, 8)
    return codes[..., _AWQ_ORDER].flatten(1)


def _take_compressed(name: str, tensors: Tensors, scheme: Scheme) -> Found | None:
    stem = name.removesuffix("_packed")
    if stem != name and name.endswith(".weight_packed"):
        return _take_packed(stem, tensors, scheme)
    if tensors[name].dtype not in (torch.float8_e4m3fn, torch.int8) or f"{name}_scale" not in tensors:
        return None
    weights = _weights_of(scheme)
    block = weights.get("block_structure") or (1, int(weights.get("group_size") or 0))
    return _scaled(name, tensors, f"{name}_scale", f"{name}_zero_point", block)


def _take_modelopt(name: str, tensors: Tensors, scheme: Scheme) -> Found | None:
    if tensors[name].dtype is torch.uint8 and (factor := tensors.pop(f"{name}_scale_2", None)) is not None:
        return _nvfp4(name, tensors.pop(name), tensors.pop(f"{name}_scale"), factor.float())
    return _take_fp8(name, tensors, scheme)


def _nvfp4(name: str, packed: Tensor, scales: Tensor, factor: Tensor) -> Found:
    """Takes bytes [N, K / 2], scales [N, K / 16] and the factor of the tensor."""
    if (packed.dtype, scales.dtype, factor.numel()) != (torch.uint8, torch.float8_e4m3fn, 1):
        raise ValueError(f"it has {packed.dtype} times {scales.dtype} times {factor.numel()} factors")
    columns = 2 * packed.shape[1]
    if columns != 16 * scales.shape[1]:
        raise ValueError(f"{scales.shape[1]} groups of 16 do not make {columns} columns")
    return _matrix(name, NvFp4(), packed, scales, factor.reshape(1, 1).expand(len(packed), 1), columns=columns)


def _take_packed(stem: str, tensors: Tensors, scheme: Scheme) -> Found:
    if (divisor := tensors.pop(f"{stem}_global_scale", None)) is not None:
        return _nvfp4(stem, tensors.pop(f"{stem}_packed"), tensors.pop(f"{stem}_scale"), 1 / divisor.float())
    bits = int(_weights_of(scheme)["num_bits"])
    words, scales = tensors.pop(f"{stem}_packed"), tensors.pop(f"{stem}_scale")
    num_rows, columns = tensors.pop(f"{stem}_shape").tolist()
    if not 0 < columns <= words.shape[1] * 32 // bits:
        raise ValueError(f"it has {columns} columns")
    scales = _of_rows(scales, num_rows, 1)
    zeros = torch.full(scales.shape, 1 << bits - 1, dtype=torch.int32)
    if (stored := tensors.pop(f"{stem}_zero_point", None)) is not None:
        if stored.dtype is torch.int32 and len(stored) == -(-num_rows * bits // 32):  # packed along the rows
            zeros = unpacked(stored.t().contiguous(), bits)[:, :num_rows].t()
        else:
            zeros = stored + zeros
    order = tensors.pop(f"{stem}_g_idx", None)
    codec = _integer_codec(bits, columns, scales.shape[1], _weights_of(scheme), order)
    return _matrix(stem, codec, words, scales, zeros, columns=columns)


def _weights_of(scheme: Scheme) -> Mapping[str, Any]:
    """Returns how weights are stored, but for those in NVFP4, of which the tensors say all. Raises ValueError if
    different layers have them in different ways."""
    found: list[Mapping[str, Any]] = [group["weights"] for group in scheme["config_groups"].values()]
    groups = [each for each in found if not is_nvfp4(each)]
    if any((each["num_bits"], each["type"]) != (groups[0]["num_bits"], groups[0]["type"]) for each in groups):
        raise ValueError("layers differ in their bits")
    return groups[0]


def _take_bitsandbytes(name: str, tensors: Tensors, scheme: Scheme) -> Found | None:
    if tensors[name].dtype is torch.int8 and (scales := name.removesuffix("weight") + "SCB") in tensors:
        tensors.pop(name.removesuffix("weight") + "weight_format", None)
        tensors[scales] = tensors[scales].float() * _INT8_UNIT
        return _scaled(name, tensors, scales)
    return _take_bitsandbytes_4(name, tensors)


def _take_bitsandbytes_4(name: str, tensors: Tensors) -> Found | None:
    kinds = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    state_name = next((each for each in kinds if each in tensors), None)
    if state_name is None:
        return None
    state = json.loads(bytes(tensors.pop(state_name).tolist()))
    num_rows, columns = (int(size) for size in state["shape"])
    size = int(state["blocksize"])
    if columns % size:
        raise ValueError(f"{columns} columns are no multiple of its blocks of {size}")
    factors = _absmax(name, tensors, state).view(num_rows, columns // size)
    levels = tuple(tensors.pop(f"{name}.quant_map").float().tolist())
    return _matrix(
        name, LookedUp(levels, size), tensors.pop(name).view(num_rows, columns // 2), factors, columns=columns
    )


def _absmax(name: str, tensors: Tensors, state: Mapping[str, Any]) -> Tensor:
    """Returns a scale for each block, in float32, which may be stored in 8 bits themselves."""
    scales = tensors.pop(f"{name}.absmax")
    if "nested_blocksize" not in state:
        return scales.float()
    levels, factors = (tensors.pop(f"{name}.{each}").float() for each in ("nested_quant_map", "nested_absmax"))
    spread_factors = factors.repeat_interleave(int(state["nested_blocksize"]))[: len(scales)]
    return levels[scales.int()] * spread_factors + float(state["nested_offset"])


def _take_quark(name: str, tensors: Tensors, scheme: Scheme) -> Found | None:
    scales = f"{name}_scale"
    if scales not in tensors:
        return None
    if tensors[name].dtype is torch.int32:
        return _quark_integers(name, tensors, scheme)
    if (tensors[name].dtype, tensors[scales].dtype) == (torch.uint8, torch.uint8):
        return _fp4(name, tensors.pop(name), tensors.pop(scales))
    if tensors[name].dtype in (torch.float8_e4m3fn, torch.int8):
        return _scaled(name, tensors, scales, f"{name}_zero_point")
    return None


def _quark_integers(name: str, tensors: Tensors, scheme: Scheme) -> Found:
    """Takes words [K, N / 8] of integers of 4 bits, and zeros [G, N / 8], whose highest bit may be their sign."""
    weights, *_ = [each for each in quark_weights(scheme) if each["dtype"] in ("int4", "uint4")]
    in_order = (scheme.get("export") or {}).get("pack_method") == "order"
    sign, stem = 8 if weights["dtype"] == "int4" else 0, name.removesuffix("weight")
    scales = tensors[f"{stem}scales"] = tensors.pop(f"{name}_scale")  # [G, N]
    codes, zeros = (
        (unpacked(words, 4) if in_order else _awq_codes(words))[:, : scales.shape[1]].t().contiguous() ^ sign
        for words in (tensors.pop(name), tensors.pop(f"{name}_zero_point"))
    )
    return _packed_integers(stem, tensors, weights, 4, packed(codes, 4), zeros)


_METHODS: dict[str, Callable[[str, Tensors, Scheme], Found | None]] = {
    "fp8": _take_fp8,
    "mxfp4": _take_mxfp4,
    "gptq": _take_gptq,
    "awq": _take_awq,
    "compressed-tensors": _take_compressed,
    "modelopt": _take_modelopt,
    "bitsandbytes": _take_bitsandbytes,
    "quark": _take_quark,
}
