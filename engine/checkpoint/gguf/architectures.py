"""The architectures that GGUF files name: their settings as transformers spells them, and their tensors' names."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from engine.checkpoint.gguf.header import GgufFile
from engine.checkpoint.gguf.metadata import Metadata, shown
from engine.checkpoint.gguf.settings import (
    FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    Settings,
    gemma2_settings,
    gemma3_settings,
    gemma_settings,
    granite_settings,
    llama_settings,
    llama_type,
    phi3_settings,
    plain_settings,
    qwen2_moe_settings,
    qwen3_moe_settings,
    smollm3_settings,
    starcoder2_settings,
    usual_settings,
)
from engine.core.errors import UnsupportedModelError

__all__ = ["Architecture", "Place", "architecture_of", "config_of", "places_of"]


@dataclass(frozen=True, slots=True)
class Place:
    """What tensors of the file become in the model."""

    name: str
    """The model's parameter."""
    sources: tuple[str, ...]
    """Tensors of the file; several are joined along their rows, expert by expert."""
    num_rotated_heads: int = 0
    """Heads whose rows are stored as pairs of a rotation, one after the other; the model has them half by half."""
    offset: float = 0.0
    """What is to be added to each number."""
    is_column: bool = False
    """Whether the file has a vector where the model has a matrix of one row."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a name of `general.architecture` stands for."""

    model_type: Callable[[Metadata], str]
    own: Callable[[Metadata], Settings]
    """Settings beside those that all architectures have."""
    names: Mapping[str, str]
    """Part of a layer in the file -> in the model's layer."""
    is_rotated: bool = False
    """Whether rows of queries and keys are stored as pairs of a rotation: see `Place`."""
    norm_offset: float = 0.0


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_EXPERTS = {"ffn_gate_inp": "mlp.gate", "ffn_gate_exps+ffn_up_exps": "mlp.experts.gate_up_proj"}
_MOE = {**_LLAMA, **_EXPERTS, "ffn_down_exps": "mlp.experts.down_proj"}
_SHARED = {
    **{"ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj"},
    **{"ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_ATTENTION, **_MLP, **_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_OLMO2 = {**_ATTENTION, **_MLP, **_POST_NORMS}
_PHI3 = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_STARCODER2 = {**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _named(model_type: str) -> Callable[[Metadata], str]:
    return lambda _: model_type


_ARCHITECTURES = {
    "llama": Architecture(llama_type, llama_settings, _MOE, is_rotated=True),
    "qwen2": Architecture(_named("qwen2"), plain_settings, _LLAMA),
    "qwen2moe": Architecture(_named("qwen2_moe"), qwen2_moe_settings, {**_MOE, **_SHARED}),
    "qwen3": Architecture(_named("qwen3"), plain_settings, _LLAMA),
    "qwen3moe": Architecture(_named("qwen3_moe"), qwen3_moe_settings, _MOE),
    "gemma": Architecture(_named("gemma"), gemma_settings, _LLAMA, norm_offset=-1.0),
    "gemma2": Architecture(_named("gemma2"), gemma2_settings, _GEMMA, norm_offset=-1.0),
    "gemma3": Architecture(_named("gemma3_text"), gemma3_settings, _GEMMA, norm_offset=-1.0),
    "phi3": Architecture(_named("phi3"), phi3_settings, _PHI3),
    "granite": Architecture(_named("granite"), granite_settings, _LLAMA, is_rotated=True),
    "olmo2": Architecture(_named("olmo2"), plain_settings, _OLMO2),
    "starcoder2": Architecture(_named("starcoder2"), starcoder2_settings, _STARCODER2),
    "smollm3": Architecture(_named("smollm3"), smollm3_settings, _LLAMA, is_rotated=True),
}


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """Returns the architecture's name and what it stands for. Raises UnsupportedModelError if it is not known."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} has a model of the architecture {shown(name)}, which cannot be served from a GGUF file; "
            f"those that can are {', '.join(sorted(_ARCHITECTURES))}."
        )
    return name, _ARCHITECTURES[name]


def config_of(file: GgufFile) -> Settings:
    """Returns the content of config.json. Raises ModelError."""
    name, architecture = architecture_of(file)
    data = Metadata(file, name)
    config = {**usual_settings(data), **architecture.own(data), "model_type": architecture.model_type(data)}
    data.check_all_known()
    return config


def places_of(file: GgufFile) -> Iterator[Place]:
    """Yields where all tensors of the file go. Raises ModelError for one that has no place."""
    name, architecture = architecture_of(file)
    data = Metadata(file, name)
    heads = {"attn_q": data.size("attention.head_count")}
    heads["attn_k"] = data.size("attention.head_count_kv", heads["attn_q"])
    joined = {part: key.split("+") for key in architecture.names for part in key.split("+")}
    for tensor in file.tensors:
        prefix, part, kind = _split_name(tensor)
        if tensor in (FACTORS, SHORT_FACTORS, LONG_FACTORS):
            continue
        known = _TOP if not prefix else architecture.names
        parts = joined.get(part, [part]) if prefix else [part]
        to = known.get("+".join(parts))
        if to is None or kind not in ("weight", "bias"):
            raise UnsupportedModelError(
                f"{file.path}: the tensor {tensor[:64]!r} has no place in a model of the architecture {name}."
            )
        if part != parts[0]:
            continue  # it goes with the first
        layer = f"model.layers.{prefix.split('.')[1]}." if prefix else ""
        suffix = "" if to.startswith("mlp.experts.") else f".{kind}"
        is_norm = to.endswith("norm")
        yield Place(
            f"{layer}{to}{suffix}",
            tuple(f"{prefix}{each}.{kind}" for each in parts),
            num_rotated_heads=heads.get(part, 0) if architecture.is_rotated else 0,
            offset=architecture.norm_offset if is_norm else 0.0,
            is_column=to == "mlp.shared_expert_gate",
        )


def _split_name(tensor: str) -> tuple[str, str, str]:
    """Returns the layer's prefix, which is empty for tensors outside the layers, the part, and weight or bias."""
    match = re.fullmatch(r"(blk\.\d{1,9}\.)?([a-z_0-9]+)\.([a-z]+)", tensor)
    return (match[1] or "", match[2], match[3]) if match else ("", tensor, "")
