"""The formats in which models are served, each with its description and its definition."""

from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from benchmarks.formats import definitions, roundings
from benchmarks.formats.checkpoints import Gguf, Published
from benchmarks.formats.definitions import AWQ_ORDER, FP4_LEVELS, NF4_LEVELS, Store, Stored

__all__ = ["FORMATS"]

GROUP = 128  # columns that share a scale, where a format leaves that open


def _compressed(kind: str, bits: int, type_: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": type_, **more}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


def _quark(kind: str, grouping: str, **more: Any) -> dict[str, Any]:
    weight = {"dtype": kind, "qscheme": grouping, "ch_axis": 1 if grouping == "per_group" else 0, **more}
    layers = {"global_quant_config": {"weight": weight, "input_tensors": None}, "layer_quant_config": {}}
    return {"quant_method": "quark", "algo_config": None, "exclude": ["lm_head"], **layers}


def _plain(weight: np.ndarray) -> Stored:
    return {"weight": torch.from_numpy(weight).bfloat16()}, weight.astype(np.float64)


def _static(store: Store, name: str) -> Store:
    """Adds a scale of rows under that name, as files of a static scheme have it."""

    def with_scale(weight: np.ndarray) -> Stored:
        tensors, numbers = store(weight)
        return {**tensors, name: torch.tensor(0.5)}, numbers

    return with_scale


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
_STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
_MODELOPT_FP8, _MODELOPT_NVFP4 = ({"quant_method": "modelopt", "quant_algo": name} for name in ("FP8", "NVFP4"))
_PACKED_4, _PACKED_8 = (_compressed("pack-quantized", bits, "int", group_size=GROUP) for bits in (4, 8))
_W8A8 = _compressed("int-quantized", 8, "int")
_W8A8_FP8 = _compressed("float-quantized", 8, "float")
_BLOCKS_FP8 = _compressed("float-quantized", 8, "float", block_structure=[GROUP, GROUP])
_NVFP4 = _compressed("nvfp4-pack-quantized", 4, "float", group_size=16)
_QUARK_MXFP4 = _quark("fp4", "per_group", group_size=32, scale_format="e8m0")
_QUARK_INT4, _QUARK_UINT4 = (_quark(kind, "per_group", group_size=GROUP) for kind in ("int4", "uint4"))

_blocks, _compressed_blocks = (definitions.fp8_blocks(f"weight_scale{end}", GROUP) for end in ("_inv", ""))
_powers = definitions.fp8_blocks("weight_scale_inv", GROUP, has_powers=True)
_by_row, _by_tensor = (definitions.fp8("weight_scale", shape) for shape in ((0, 1), ()))
_static_fp8 = _static(definitions.fp8("weight_scale_inv", ()), "activation_scale")
_nvfp4 = definitions.nvfp4(("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"), True)
_modelopt_nvfp4 = definitions.nvfp4(("weight", "weight_scale", "weight_scale_2", "input_scale"), False)
_int8_by_row = definitions.int8("weight_scale", 1.0)
_int4, _uint4 = (definitions.quark_integers(GROUP, sign, AWQ_ORDER) for sign in (8, 0))

_PUBLISHED = {
    "bfloat16": Published(None, _plain),
    "fp8, in blocks": Published(_FP8, _blocks, roundings.e4m3_rows(GROUP)),
    "fp8, in blocks, ue8m0": Published({**_FP8, "scale_fmt": "ue8m0"}, _powers, roundings.e4m3_rows(GROUP)),
    "fp8, static": Published(_STATIC_FP8, _static_fp8, roundings.e4m3_tensor),
    "gptq, 2 bits": Published({**_GPTQ, "bits": 2}, definitions.gptq(2, GROUP, False, 1)),
    "gptq, 4 bits": Published(_GPTQ, definitions.gptq(4, GROUP, False, 1)),
    "gptq, 4 bits, desc_act": Published({**_GPTQ, "desc_act": True}, definitions.gptq(4, GROUP, True, 1)),
    "gptq, 8 bits": Published({**_GPTQ, "bits": 8}, definitions.gptq(8, GROUP, False, 1)),
    "awq": Published(_AWQ, definitions.awq(GROUP)),
    "compressed-tensors W4A16": Published(_PACKED_4, definitions.compressed(4, GROUP, True)),
    "compressed-tensors W4A16, zeros": Published(_PACKED_4, definitions.compressed(4, GROUP, False)),
    "compressed-tensors W8A16": Published(_PACKED_8, definitions.compressed(8, GROUP, True)),
    "compressed-tensors W8A8": Published(_W8A8, _int8_by_row, roundings.int8_rows),
    "compressed-tensors FP8": Published(_W8A8_FP8, _by_row, roundings.e4m3_rows()),
    "compressed-tensors FP8, in blocks": Published(_BLOCKS_FP8, _compressed_blocks, roundings.e4m3_rows(GROUP)),
    "compressed-tensors NVFP4": Published(_NVFP4, _nvfp4, roundings.e2m1_rows),
    "modelopt FP8": Published(_MODELOPT_FP8, _static(_by_tensor, "input_scale"), roundings.e4m3_tensor),
    "modelopt NVFP4": Published(_MODELOPT_NVFP4, _modelopt_nvfp4, roundings.e2m1_rows),
    "quark FP8": Published(_quark("fp8_e4m3", "per_tensor"), _by_tensor, roundings.e4m3_tensor),
    "quark int8": Published(_quark("int8", "per_channel"), _int8_by_row, roundings.int8_rows),
    "quark int4": Published(_QUARK_INT4, _int4),
    "quark uint4": Published(_QUARK_UINT4, _uint4),
    "quark MXFP4": Published(_QUARK_MXFP4, definitions.mxfp4_matrix),
    "bitsandbytes int8": Published(_INT8, definitions.int8("SCB", 1 / 127), roundings.int8_rows_but_outliers),
    "bitsandbytes NF4": Published(_NF4, definitions.bits_of_4("nf4", NF4_LEVELS, 64, False)),
    "bitsandbytes NF4, nested": Published(_NF4, definitions.bits_of_4("nf4", NF4_LEVELS, 64, True)),
    "bitsandbytes FP4": Published(
        {**_NF4, "bnb_4bit_quant_type": "fp4"}, definitions.bits_of_4("fp4", FP4_LEVELS, 64, False)
    ),
}
_NARROW = {
    **{Type.Q6_K: Type.Q8_0, Type.Q5_K: Type.Q5_1, Type.Q4_K: Type.Q5_0},
    **dict.fromkeys((Type.Q3_K, Type.Q2_K, Type.IQ4_XS), Type.IQ4_NL),
}
"""Type with blocks of 256 -> the one that llama.cpp chooses for rows that do not fit into these."""
_OTHERS = (
    *(Type.F16, Type.BF16, Type.Q8_0, Type.Q5_1, Type.Q5_0, Type.Q4_1, Type.Q4_0),
    *(Type.IQ4_NL, Type.MXFP4),
)
FORMATS: dict[str, Published | Gguf] = {
    **_PUBLISHED,
    **{f"GGUF {kind.name}": Gguf(kind) for kind in _OTHERS},
    **{f"GGUF {kind.name}, {narrow.name}": Gguf(kind, narrow) for kind, narrow in _NARROW.items()},
}
