"""Which published precisions can be served, by the quantization_config of config.json; torch-free."""

from collections.abc import Mapping
from typing import Any

from engine.core.errors import UnsupportedModelError

__all__ = ["check_scheme", "is_nvfp4", "quark_weights", "scheme_of"]

_NVFP4 = "nvfp4-pack-quantized"
_COMPRESSED = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "mixed-precision", _NVFP4)
_MODELOPT = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_QUARK_ALGORITHMS = ("awq", "gptq", "smooth", "autosmoothquant")  # what they scale is folded into weights
_HINT = "take the checkpoint that is not quantized, with --quantization int4 or int8 if its weights shall be small."


def scheme_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the description of the stored precision, which may be that of a part; None for plain numbers."""
    parts = [config, *(part for name, part in config.items() if name.endswith("_config") and isinstance(part, Mapping))]
    found = (part.get(name) for part in parts for name in ("quantization_config", "compression_config"))
    return next((each for each in found if isinstance(each, Mapping)), None)


def check_scheme(config: Mapping[str, Any], model: str) -> None:
    """Raises UnsupportedModelError, by name, for a precision that cannot be served."""
    scheme = scheme_of(config)
    if scheme is None:
        return
    method = str(scheme.get("quant_method", "bitsandbytes"))
    try:
        problem = _CHECKS[method](scheme) if method in _CHECKS else "this method is not known"
    except (AttributeError, KeyError, TypeError):
        problem = "its description is not as this method has it"
    if problem:
        raise UnsupportedModelError(f"The weights of {model} are quantized ({method[:64]}): {problem}; {_HINT}")


def _fp8(scheme: Mapping[str, Any]) -> str | None:
    block = scheme.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    return None if block is None or is_block else f"weight_block_size {str(block)[:64]} is no pair of sizes"


def _mxfp4(scheme: Mapping[str, Any]) -> str | None:
    return None


def _gptq(scheme: Mapping[str, Any]) -> str | None:
    if scheme.get("bits") not in (2, 4, 8):
        return f"weights of {str(scheme.get('bits'))[:64]} bits cannot be served"
    if scheme.get("dynamic"):
        return "layers with settings of their own cannot be served"
    kind = scheme.get("checkpoint_format", "gptq")
    return None if kind in ("gptq", "gptq_v2") else f"checkpoint_format {str(kind)[:64]!r} is not known"


def _awq(scheme: Mapping[str, Any]) -> str | None:
    kind = str(scheme.get("version", scheme.get("format", "gemm"))).lower()
    if scheme.get("bits", scheme.get("w_bit", 4)) != 4 or kind != "gemm":
        return f"weights of {str(scheme.get('bits'))[:64]} bits in the version {kind[:64]!r} cannot be served"
    return None


def _compressed_tensors(scheme: Mapping[str, Any]) -> str | None:
    formats = [scheme.get("format"), *(group.get("format") for group in _groups(scheme))]
    unknown = [each for each in formats if each is not None and each not in _COMPRESSED]
    if unknown or not _groups(scheme):
        return f"the format {str(unknown[0] if unknown else None)[:64]!r} cannot be served"
    for group in _groups(scheme):
        weights = group.get("weights") or {}
        is_known = (weights.get("num_bits"), weights.get("type")) in ((4, "int"), (8, "int"), (8, "float"))
        if (group.get("format") or scheme.get("format")) == _NVFP4:
            is_known = is_nvfp4(weights)
        if not is_known:
            return f"weights of {str(weights.get('num_bits'))[:64]} bits cannot be served"
    if scheme.get("sparsity_config") or scheme.get("transform_config"):
        return "sparse and transformed weights cannot be served"
    return None


def is_nvfp4(weights: Mapping[str, Any]) -> bool:
    """Whether a group of compressed-tensors has weights of 4 bits, floating point, in groups of 16."""
    return [weights.get(name) for name in ("num_bits", "type", "group_size")] == [4, "float", 16]


def _groups(scheme: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = scheme.get("config_groups")
    found = [*groups.values()] if isinstance(groups, Mapping) else []
    return [each for each in found if isinstance(each, Mapping)]


def _bitsandbytes(scheme: Mapping[str, Any]) -> str | None:
    if scheme.get("load_in_4bit", scheme.get("_load_in_4bit")):
        kind = scheme.get("bnb_4bit_quant_type", "fp4")
        return None if kind in ("nf4", "fp4") else f"bnb_4bit_quant_type {str(kind)[:64]!r} is not known"
    return None


def _modelopt(scheme: Mapping[str, Any]) -> str | None:
    inner = scheme.get("quantization")
    scheme = inner if isinstance(inner, Mapping) else scheme
    layers = scheme.get("quantized_layers")
    parts = [scheme]
    if scheme.get("quant_algo") == "MIXED_PRECISION" and isinstance(layers, Mapping):
        parts = [each if isinstance(each, Mapping) else {} for each in layers.values()]
    for part in parts:
        if part.get("quant_algo") not in _MODELOPT:
            return f"quant_algo {str(part.get('quant_algo'))[:64]!r} cannot be served"
        if "NVFP4" in part["quant_algo"] and part.get("group_size", 16) != 16:
            return f"groups of {str(part['group_size'])[:64]} cannot be served"
    return None


def _quark(scheme: Mapping[str, Any]) -> str | None:
    export, algorithms = scheme.get("export") or {}, scheme.get("algo_config") or []
    kind = export.get("weight_format", "real_quantized")
    if kind != "real_quantized" or export.get("pack_method", "reorder") not in ("reorder", "order"):
        return f"weight_format {str(kind)[:64]!r}, pack_method {str(export.get('pack_method'))[:64]!r} is not known"
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        if each["name"] not in _QUARK_ALGORITHMS:
            return f"what {str(each['name'])[:64]!r} does to activations is not done here"
    weights = quark_weights(scheme)
    for each in weights:
        if not _is_known_of_quark(each):
            parts = [str(each.get(name))[:64] for name in ("dtype", "qscheme", "group_size", "scale_format")]
            return f"weights in {', '.join(parts)} cannot be served"
    if len({(each["dtype"], each.get("group_size")) for each in weights if each["dtype"] in ("int4", "uint4")}) > 1:
        return "layers that differ in their integers of 4 bits cannot be served"
    return None


def quark_weights(scheme: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns how Quark stores the weights of all layers, and of some that differ."""
    layers = [scheme["global_quant_config"]]
    for name in ("layer_quant_config", "layer_type_quant_config"):
        layers += (scheme.get(name) or {}).values()
    return [layer["weight"] for layer in layers if layer and layer.get("weight")]


def _is_known_of_quark(weights: Mapping[str, Any]) -> bool:
    kind, grouping, size = (weights.get(name) for name in ("dtype", "qscheme", "group_size"))
    if kind in ("fp8_e4m3", "int8"):
        return grouping == "per_tensor" or (grouping == "per_channel" and weights.get("ch_axis") == 0)
    if kind == "fp4":
        return (grouping, size, weights.get("scale_format")) == ("per_group", 32, "e8m0")
    return kind in ("int4", "uint4") and grouping == "per_group" and weights.get("ch_axis") in (1, -1)


_CHECKS = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "quark": _quark,
}
