"""GGUF files of the tiny models, written with llama.cpp's own package as its converter writes them."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

Kinds = Callable[[str, int], Type]
"""Tensor's name in the file and its columns -> its type."""

NAMES = {"mixtral": "llama", "mistral": "llama", "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "gemma3": "gemma3"}
_SCALES = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}
_SCALES |= {Type.IQ4_NL: (0,), Type.IQ4_XS: (0,)}
"""Type -> where a block has its numbers of 16 bits."""
_ROTATED = ("llama", "granite", "smollm3")
_OWN_PARTS = {"phi3": {"mlp.gate_up_proj": "ffn_up"}, "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}}


def write_gguf(
    checkpoint: Path, path: Path, kinds: Kinds, rope_freqs: np.ndarray | None = None, **metadata: float
) -> PreTrainedModel:
    """Writes a checkpoint of transformers as a GGUF file; returns transformers' model of the numbers that it stores.

    Weights of types that the package cannot make are random.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for module in model.modules():
        if model.config.model_type == "qwen3_moe" and hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = True  # as llama.cpp computes it
    writer = gguf.GGUFWriter(path, gguf_name(model))
    _write_metadata(writer, model)
    write_vocabulary(writer, model.config.vocab_size)
    for key, value in metadata.items():
        key = f"{gguf_name(model)}.{key.replace('__', '.')}"
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    for name, numbers in _tensors(model).items():
        flat = np.ascontiguousarray(numbers)
        is_wide = flat.ndim == 1 or "ffn_gate_inp" in name
        kind = Type.F32 if is_wide else kinds(name, flat.shape[-1])
        raw = stored(flat, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        numbers[...] = gguf.dequantize(raw, kind).reshape(flat.shape)
    finish(writer)
    return _as_in_transformers(model).eval()


def in_blocks(name: str, columns: int) -> Type:
    """Returns a type of blocks in which rows of so many columns can be stored, else one of 16 bits."""
    if columns % 256:
        return Type.F16 if columns % 32 else Type.Q8_0
    return (Type.Q4_K, Type.Q6_K)[len(name) % 2]


def stored(numbers: np.ndarray, kind: Type) -> np.ndarray:
    """Returns the bytes of the numbers, or random ones where the package cannot make that type."""
    try:
        return gguf.quantize(numbers, kind)
    except NotImplementedError:
        return random_blocks(numbers.shape, kind, float(numbers.std()))


def random_blocks(shape: Sequence[int], kind: Type, std: float = 1.0) -> np.ndarray:
    """Returns random bytes [..., bytes] of a tensor whose numbers have about that standard deviation."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(len(shape) * shape[-1])
    blocks = rng.integers(0, 256, (math.prod(shape) // size, num_bytes), dtype=np.uint8)
    scales = _SCALES.get(kind, ())
    for at in scales:
        blocks[:, at : at + 2] = np.float16(1.0).reshape(1).view(np.uint8)
    spread = float(gguf.dequantize(blocks, kind).std())
    for at in scales:
        factors = rng.uniform(0.5, 1.5, (len(blocks), 1)) * std / spread
        blocks[:, at : at + 2] = factors.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(model: PreTrainedModel) -> str:
    kind = model.config.model_type.removesuffix("_text")
    return NAMES.get(kind, kind)


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = [chr(0x100 + index) for index in range(size - 2)] + ["<s>", "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (size - 2) + [3, 3])
    writer.add_token_merges([])


def _write_metadata(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    heads = config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _write_own(writer, config)


def _write_own(writer: gguf.GGUFWriter, config: Any) -> None:
    kind = config.model_type
    if kind == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    if kind == "granite":
        writer.add_logit_scale(config.logits_scaling)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
    if kind in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Name in the file -> numbers, as views of the model's parameters, which are changed as the converter does."""
    config, name = model.config, gguf_name(model)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for parameter, tensor in model.state_dict().items():
        numbers = tensor.numpy()
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+)", parameter):
            for part, each in _experts(match[2], numbers):
                tensors[f"blk.{match[1]}.ffn_{part}_exps.weight"] = each
            continue
        stem, _, suffix = parameter.rpartition(".")
        to = _own_name(model, stem) or names.get_name(stem)
        assert to is not None, parameter
        _change(model, stem, numbers, forth=True)
        tensors[f"{to}.{suffix}"] = numbers[0] if to.endswith("inp_shexp") else numbers
    return tensors


def _as_in_transformers(model: PreTrainedModel) -> PreTrainedModel:
    for parameter, tensor in model.state_dict().items():
        _change(model, parameter.rpartition(".")[0], tensor.numpy(), forth=False)
    return model


def _change(model: PreTrainedModel, stem: str, numbers: np.ndarray, forth: bool) -> None:
    """Changes a parameter in place as the converter does, or back."""
    config, name = model.config, gguf_name(model)
    if name.startswith("gemma") and stem.endswith("norm"):
        numbers += 1 if forth else -1
    if name in _ROTATED and stem.endswith((".q_proj", ".k_proj")):
        heads = config.num_attention_heads if stem.endswith(".q_proj") else config.num_key_value_heads
        shape = (heads, 2, -1) if forth else (heads, -1, 2)
        numbers[...] = numbers.reshape(*shape, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)


def _own_name(model: PreTrainedModel, stem: str) -> str | None:
    """The name of a part whose name in transformers has changed since the package's table was made."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
    if stem == "lm_head":
        return "output"
    parts = {**_OWN_PARTS.get(model.config.model_type, {}), "mlp.gate": "ffn_gate_inp"}
    return f"blk.{match[1]}.{parts[match[2]]}" if match and match[2] in parts else None


def _experts(name: str, stack: np.ndarray) -> list[tuple[str, np.ndarray]]:
    if name == "down_proj":
        return [("down", stack)]
    gate, up = np.split(stack, 2, axis=1)
    return [("gate", gate), ("up", up)]
