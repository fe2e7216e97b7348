"""Tiny checkpoints in published precisions, and the numbers that each format's definition gives them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.formats import definitions
from benchmarks.formats.definitions import AWQ_ORDER, Store

BLOCK, GROUP = 20, 8


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


def _by_shape(wide: Store, tall: Store) -> Store:
    return lambda weight: (wide if weight.shape[0] < weight.shape[1] else tall)(weight)


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
_NVFP4 = definitions.nvfp4(
    ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"), has_divisor=True
)
_MODELOPT = definitions.nvfp4(("weight", "weight_scale", "weight_scale_2", "input_scale"), has_divisor=False)
_LEVELS = tuple(np.sort(np.random.default_rng(4).uniform(-1, 1, 16)).tolist())  # no format's: a file has its own
_NF4, _NF4_NESTED = (definitions.bits_of_4("nf4", _LEVELS, GROUP, is_nested) for is_nested in (False, True))
METHODS: dict[str, tuple[dict[str, Any], Store]] = {
    "fp8 in blocks": ({**_FP8, "weight_block_size": [BLOCK, BLOCK]}, definitions.fp8_blocks("weight_scale_inv", BLOCK)),
    "fp8 by tensor": ({**_FP8, "dequantize": True}, definitions.fp8("weight_scale_inv", ())),
    "fp8 by row": (_compressed_scheme("float-quantized", 8, "float"), definitions.fp8("weight_scale", (0, 1))),
    "gptq": (_GPTQ, definitions.gptq(4, GROUP, False, 1)),
    "gptq in another order": ({**_GPTQ, "desc_act": True}, definitions.gptq(4, GROUP, True, 1)),
    "gptq of 8 bits": ({**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, definitions.gptq(8, GROUP, False, 0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, definitions.awq(GROUP)),
    "w4a16": (_compressed_scheme("pack-quantized", 4, "int"), definitions.compressed(4, GROUP, True)),
    "w4a16 with zeros": (_compressed_scheme("pack-quantized", 4, "int"), definitions.compressed(4, GROUP, False)),
    "w8a16": (_compressed_scheme("pack-quantized", 8, "int"), definitions.compressed(8, GROUP, True)),
    "w8a8": (_compressed_scheme("int-quantized", 8, "int"), definitions.int8("weight_scale", 1.0)),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, definitions.int8("SCB", 1 / 127)),
    "quark fp8": (_quark_scheme("fp8_e4m3", "per_channel"), definitions.fp8("weight_scale", (0,))),
    "quark int8": (_quark_scheme("int8", "per_tensor"), definitions.int8("weight_scale", 1.0)),
    "quark mxfp4": (_quark_scheme("fp4", "per_group", group_size=32, scale_format="e8m0"), definitions.mxfp4_matrix),
    "quark int4": (
        _quark_scheme("int4", "per_group", group_size=GROUP),
        definitions.quark_integers(GROUP, 8, AWQ_ORDER),
    ),
    "quark uint4": (
        {**_quark_scheme("uint4", "per_group", group_size=GROUP), "export": {"pack_method": "order"}},
        definitions.quark_integers(GROUP, 0, tuple(range(8))),
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _NF4),
    "nf4 twice": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _NF4_NESTED),
    "mxfp4": ({"quant_method": "mxfp4"}, definitions.mxfp4_experts),
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
        _by_shape(definitions.fp8("weight_scale", (0, 1)), _NVFP4),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}}, _MODELOPT),
    "modelopt with fp8": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"down": {"quant_algo": "FP8"}, "up": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
        },
        _by_shape(definitions.fp8("weight_scale", ()), _MODELOPT),
    ),
}
