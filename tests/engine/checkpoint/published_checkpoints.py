"""Tiny checkpoints in published precisions, written by each format's definition, and the numbers that it gives them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Stored = tuple[dict[str, Tensor], np.ndarray]
"""Tensors by the last part of their names, and the numbers [N, K] that they stand for, in float64."""

BLOCK, GROUP = 20, 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_published(checkpoint: Path, method: str, changes: dict[str, Any] | None = None) -> PreTrainedModel:
    """Writes a checkpoint's layers again as `method` stores them; returns transformers' model of these numbers."""
    scheme, store = METHODS[method]
    plain = load_file(checkpoint / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, weight in plain.items():
        if not name.startswith("model.layers") or ".gate." in name or not _is_taken(method, weight):
            tensors[name] = weight
            continue
        found, numbers = store(weight.float().numpy())
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{last}": tensor.contiguous() for last, tensor in found.items()}
        plain[name] = torch.from_numpy(numbers).float()
    reference = write_beside_reference(checkpoint, tensors, plain, quantization_config={**scheme, **(changes or {})})
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        reference, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def write_beside_reference(
    checkpoint: Path, tensors: dict[str, Tensor], plain: dict[str, Tensor], **changes: Any
) -> Path:
    """Gives a checkpoint these tensors and changes of its configuration; returns another one, of the plain tensors and
    without these changes."""
    reference = checkpoint / "reference"
    reference.mkdir()
    save_file(plain, reference / "model.safetensors", {"format": "pt"})
    shutil.copy(checkpoint / "config.json", reference)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **changes}))
    return reference


def _is_taken(method: str, weight: Tensor) -> bool:
    if method == "mxfp4":
        return weight.dim() == 3 and weight.shape[1] % 32 == 0
    if method == "quark mxfp4":
        return weight.dim() == 2 and weight.shape[1] % 32 == 0
    return weight.dim() == 2 and (not method.startswith(("nvfp4", "modelopt")) or weight.shape[1] % 16 == 0)


def _fp8_blocks(weight: np.ndarray) -> Stored:
    scales = np.random.default_rng(1).uniform(0.5, 1.5, [-(-size // BLOCK) for size in weight.shape]).astype(np.float32)
    wide = scales.repeat(BLOCK, 0).repeat(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    numbers = torch.from_numpy(weight / wide).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, "weight_scale_inv": torch.from_numpy(scales)}
    return tensors, numbers.double().numpy() * wide.astype(np.float64)


def _fp8(name: str, shape: tuple[int, ...]) -> Callable[[np.ndarray], Stored]:
    def store(weight: np.ndarray) -> Stored:
        sizes = [size or weight.shape[0] for size in shape]
        scales = torch.from_numpy(np.random.default_rng(1).uniform(0.5, 1.5, sizes)).bfloat16()
        wide = scales.double().numpy().reshape(-1, 1)
        numbers = torch.from_numpy(weight / wide).to(torch.float8_e4m3fn)
        return {"weight": numbers, name: scales}, numbers.double().numpy() * wide

    return store


def _codes(weight: np.ndarray, bits: int, is_symmetric: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes [N, K], and scales and zeros [N, G] of groups, of which the last may be smaller."""
    starts = np.arange(0, weight.shape[1], GROUP)
    low, high = np.minimum.reduceat(weight, starts, 1), np.maximum.reduceat(weight, starts, 1)
    top = (1 << bits) - 1
    if is_symmetric:
        high = np.maximum(-low, high)
        low = -high
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.full(scales.shape, 1 << (bits - 1)) if is_symmetric else np.clip(np.round(-low / scales), 1, top)
    groups = np.arange(weight.shape[1]) // GROUP
    codes = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, top)
    return codes.astype(np.int64), scales, zeros.astype(np.int64)


def _words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Returns codes [R, C] as words [R, C * bits / 32]; place i of a word has the column `order[i]` of its columns."""
    each = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each)))
    parts = padded.reshape(len(codes), -1, each).astype(np.uint64)
    words = sum(parts[:, :, column] << np.uint64(bits * place) for place, column in enumerate(order or range(each)))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def _numbers(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return (codes - zeros[:, groups]) * scales.astype(np.float64)[:, groups]


def _gptq(bits: int, has_order: bool, stored_zero: int) -> Callable[[np.ndarray], Stored]:
    def store(weight: np.ndarray) -> Stored:
        codes, scales, zeros = _codes(weight, bits)
        groups = np.arange(weight.shape[1]) // GROUP
        if has_order:
            groups = np.random.default_rng(2).permutation(groups)
        tensors = {
            "qweight": _words(codes, bits).t(),
            "qzeros": _words((zeros - stored_zero).T, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, _numbers(codes, scales, zeros, groups)

    return store


def _awq(weight: np.ndarray) -> Stored:
    codes, scales, zeros = _codes(weight, 4)
    tensors = {"qweight": _words(codes.T, 4, _AWQ_ORDER), "qzeros": _words(zeros.T, 4, _AWQ_ORDER)}
    tensors["scales"] = torch.from_numpy(scales.T.copy())
    return tensors, _numbers(codes, scales, zeros, np.arange(weight.shape[1]) // GROUP)


def _quark_integers(sign: int, order: tuple[int, ...]) -> Callable[[np.ndarray], Stored]:
    """Stores codes whose highest bit `sign` inverts, if it is one."""

    def store(weight: np.ndarray) -> Stored:
        codes, scales, zeros = _codes(weight, 4)
        tensors = {"weight": _words(codes.T ^ sign, 4, order), "weight_zero_point": _words(zeros.T ^ sign, 4, order)}
        tensors["weight_scale"] = torch.from_numpy(scales.T.astype(np.float32))
        return tensors, _numbers(codes, scales, zeros, np.arange(weight.shape[1]) // GROUP)

    return store


def _compressed(bits: int, is_symmetric: bool) -> Callable[[np.ndarray], Stored]:
    def store(weight: np.ndarray) -> Stored:
        codes, scales, zeros = _codes(weight, bits, is_symmetric)
        tensors = {
            "weight_packed": _words(codes, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = _words(zeros.T, bits).t()
        return tensors, _numbers(codes, scales, zeros, np.arange(weight.shape[1]) // GROUP)

    return store


def _int8(scale: str, unit: float) -> Callable[[np.ndarray], Stored]:
    def store(weight: np.ndarray) -> Stored:
        largest = np.abs(weight).max(1, keepdims=True).astype(np.float32)
        codes = np.round(weight / largest * 127).astype(np.int8)
        scales = torch.from_numpy(largest / 127 / np.float32(unit))
        tensors = {"weight": torch.from_numpy(codes), scale: scales.flatten() if scale == "SCB" else scales}
        return tensors, codes * scales.double().numpy() * unit

    return store


def _mxfp4(weight: np.ndarray) -> Stored:
    """Stores experts, [E, K, N] in transformers; other weights have no such form."""
    rows = np.swapaxes(weight, 1, 2)
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, rows.shape)
    exponents = rng.integers(123, 127, (*rows.shape[:2], rows.shape[2] // 32))
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = levels[codes & 7] * np.where(codes & 8, -1.0, 1.0) * 2.0 ** (exponents.repeat(32, 2) - 127)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(*exponents.shape, 16)
    tensors = {
        "_blocks": torch.from_numpy(packed.astype(np.uint8)),
        "_scales": torch.from_numpy(exponents.astype(np.uint8)),
    }
    return tensors, np.ascontiguousarray(np.swapaxes(values, 1, 2))


def _mxfp4_matrix(weight: np.ndarray) -> Stored:
    tensors, numbers = _mxfp4(weight.T[None])
    packed, exponents = tensors["_blocks"][0], tensors["_scales"][0]
    return {"weight": packed.flatten(1), "weight_scale": exponents}, np.ascontiguousarray(numbers[0].T)


def _nvfp4(names: tuple[str, str, str, str], has_divisor: bool) -> Callable[[np.ndarray], Stored]:
    """Stores bytes, scales, the factor of the tensor, or its reciprocal, and that of activations under these names."""

    def store(weight: np.ndarray) -> Stored:
        levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        groups = weight.reshape(len(weight), -1, 16).astype(np.float64)
        factor = np.float32(np.abs(weight).max() / (6 * 448))
        last = np.float32(1 / factor) if has_divisor else factor
        factor = 1 / np.float64(last) if has_divisor else np.float64(last)
        scales = torch.from_numpy(np.abs(groups).max(2) / 6 / factor).to(torch.float8_e4m3fn)
        wide = scales.double().numpy()[..., None] * factor
        codes = np.abs(np.abs(groups / wide)[..., None] - levels).argmin(3)
        numbers = (levels[codes] * np.sign(groups) * wide).reshape(weight.shape)
        codes = (codes | (groups < 0) * 8).reshape(weight.shape)
        packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        factors = torch.tensor([[last], [9.0]] if has_divisor else [last, 9.0])
        return dict(zip(names, (packed, scales, *factors), strict=True)), numbers

    return store


def _by_shape(
    wide: Callable[[np.ndarray], Stored], tall: Callable[[np.ndarray], Stored]
) -> Callable[[np.ndarray], Stored]:
    return lambda weight: (wide if weight.shape[0] < weight.shape[1] else tall)(weight)


def _nf4(is_nested: bool) -> Callable[[np.ndarray], Stored]:
    def store(weight: np.ndarray) -> Stored:
        levels = np.sort(np.random.default_rng(4).uniform(-1, 1, 16)).astype(np.float32)
        flat = weight.reshape(-1, GROUP)
        scales = np.abs(flat).max(1).astype(np.float32)
        state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float32", "shape": [*weight.shape]}
        tensors: dict[str, Tensor] = {}
        if is_nested:
            table = np.linspace(0, 1, 256, dtype=np.float32)
            factors = np.full(-(-len(scales) // 256), scales.max(), np.float32)
            nested = np.round(scales / scales.max() * 255).astype(np.uint8)
            scales = table[nested] * factors.repeat(256)[: len(nested)] + np.float32(0.125)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.125}
            tensors = {
                "weight.nested_quant_map": torch.from_numpy(table),
                "weight.nested_absmax": torch.from_numpy(factors),
            }
        codes = np.abs((flat / scales[:, None])[..., None] - levels).argmin(2)
        pairs = codes.reshape(-1, 2)
        tensors |= {
            "weight": torch.from_numpy((pairs[:, :1] << 4 | pairs[:, 1:]).astype(np.uint8)),
            "weight.absmax": torch.from_numpy(nested if is_nested else scales),
            "weight.quant_map": torch.from_numpy(levels),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
        }
        return tensors, (levels.astype(np.float64)[codes] * scales[:, None]).reshape(weight.shape)

    return store


def _compressed_scheme(kind: str, bits: int, type_: str, group: int = GROUP) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": type_, "group_size": group}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


def _quark_scheme(kind: str, grouping: str, **more: Any) -> dict[str, Any]:
    weight = {"dtype": kind, "qscheme": grouping, "ch_axis": 1 if grouping == "per_group" else 0, **more}
    layers = {"global_quant_config": {"weight": weight, "input_tensors": None}, "layer_quant_config": {}}
    return {"quant_method": "quark", "algo_config": None, "exclude": ["lm_head"], **layers}


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
_NVFP4_SCHEME = _compressed_scheme("nvfp4-pack-quantized", 4, "float", 16)
_NVFP4 = _nvfp4(("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"), has_divisor=True)
_MODELOPT = _nvfp4(("weight", "weight_scale", "weight_scale_2", "input_scale"), has_divisor=False)
METHODS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], Stored]]] = {
    "fp8 in blocks": ({**_FP8, "weight_block_size": [BLOCK, BLOCK]}, _fp8_blocks),
    "fp8 by tensor": ({**_FP8, "dequantize": True}, _fp8("weight_scale_inv", ())),
    "fp8 by row": (_compressed_scheme("float-quantized", 8, "float"), _fp8("weight_scale", (0, 1))),
    "gptq": (_GPTQ, _gptq(4, False, 1)),
    "gptq in another order": ({**_GPTQ, "desc_act": True}, _gptq(4, True, 1)),
    "gptq of 8 bits": ({**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, _gptq(8, False, 0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "w4a16": (_compressed_scheme("pack-quantized", 4, "int"), _compressed(4, True)),
    "w4a16 with zeros": (_compressed_scheme("pack-quantized", 4, "int"), _compressed(4, False)),
    "w8a16": (_compressed_scheme("pack-quantized", 8, "int"), _compressed(8, True)),
    "w8a8": (_compressed_scheme("int-quantized", 8, "int"), _int8("weight_scale", 1.0)),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8("SCB", 1 / 127)),
    "quark fp8": (_quark_scheme("fp8_e4m3", "per_channel"), _fp8("weight_scale", (0,))),
    "quark int8": (_quark_scheme("int8", "per_tensor"), _int8("weight_scale", 1.0)),
    "quark mxfp4": (_quark_scheme("fp4", "per_group", group_size=32, scale_format="e8m0"), _mxfp4_matrix),
    "quark int4": (_quark_scheme("int4", "per_group", group_size=GROUP), _quark_integers(8, _AWQ_ORDER)),
    "quark uint4": (
        {**_quark_scheme("uint4", "per_group", group_size=GROUP), "export": {"pack_method": "order"}},
        _quark_integers(0, tuple(range(8))),
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4(False)),
    "nf4 twice": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4(True)),
    "mxfp4": ({"quant_method": "mxfp4"}, _mxfp4),
    "nvfp4": (_NVFP4_SCHEME, _NVFP4),
    "nvfp4 and fp8": (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {**_NVFP4_SCHEME["config_groups"]["group_0"], "format": "nvfp4-pack-quantized"},
                "group_1": {"weights": {"num_bits": 8, "type": "float"}, "format": "float-quantized"},
            },
        },
        _by_shape(_fp8("weight_scale", (0, 1)), _NVFP4),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}}, _MODELOPT),
    "modelopt with fp8": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"down": {"quant_algo": "FP8"}, "up": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
        },
        _by_shape(_fp8("weight_scale", ()), _MODELOPT),
    ),
}
