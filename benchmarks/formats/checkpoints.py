"""Writes a small Llama in a published format: as safetensors with its description, or as a GGUF file."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from benchmarks.formats.definitions import Store
from benchmarks.formats.k_blocks import BLOCKS
from benchmarks.formats.llama import Rounding

__all__ = ["Gguf", "Published", "Written"]


@dataclass(frozen=True)
class Written:
    """A checkpoint, and what it stands for."""

    path: Path
    weights: dict[str, Tensor]
    """Numbers in float64 by the model's parameters."""
    bits: float
    """Stored for a number of the layers' matrices."""


@dataclass(frozen=True)
class Published:
    """Safetensors in which the layers' matrices are stored by one of the definitions."""

    scheme: Mapping[str, Any] | None
    """The `quantization_config`; None for plain numbers."""
    store: Store
    rounding: Rounding | None = None
    """How the method rounds what it multiplies."""

    def write(self, model: Path, folder: Path) -> Written:
        tensors: dict[str, Tensor] = {}
        weights: dict[str, Tensor] = {}
        num_bytes = num_numbers = 0
        for name, weight in load_file(model / "model.safetensors").items():
            if not _is_matrix(name):
                tensors[name], weights[name] = weight, weight.double()
                continue
            found, numbers = self.store(weight.float().numpy())
            tensors |= {f"{name.removesuffix('weight')}{last}": each.contiguous() for last, each in found.items()}
            weights[name] = torch.from_numpy(numbers)
            num_bytes, num_numbers = num_bytes + sum(each.nbytes for each in found.values()), num_numbers + numbers.size
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        for path in model.glob("token*.json"):
            shutil.copy(path, folder)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        config |= {"quantization_config": self.scheme} if self.scheme else {}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return Written(folder, weights, 8 * num_bytes / num_numbers)


@dataclass(frozen=True)
class Gguf:
    """A GGUF file whose matrices have one type; `narrow` is that of rows that do not fit into its blocks of 256, as
    llama.cpp chooses it. Its tokens are not the model's."""

    kind: GGMLQuantizationType
    narrow: GGMLQuantizationType | None = None
    rounding: Rounding | None = None

    def write(self, model: Path, folder: Path) -> Written:
        config = AutoConfig.from_pretrained(model)
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
        _write_metadata(writer, config)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        weights: dict[str, Tensor] = {}
        num_bytes = num_numbers = 0
        for name, weight in load_file(model / "model.safetensors").items():
            order = _row_order(config, name, len(weight))
            numbers = weight.float()[order].numpy()
            kind = self._kind(numbers)
            raw = _stored(numbers, kind)
            writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", raw, raw_dtype=kind)
            weights[name] = torch.from_numpy(gguf.dequantize(raw, kind).reshape(numbers.shape)).double()[
                order.argsort()
            ]
            if _is_matrix(name):
                num_bytes, num_numbers = num_bytes + raw.nbytes, num_numbers + numbers.size
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Written(folder / "model.gguf", weights, 8 * num_bytes / num_numbers)

    def _kind(self, numbers: np.ndarray) -> GGMLQuantizationType:
        if numbers.ndim == 1:
            return GGMLQuantizationType.F32
        fits = numbers.shape[1] % gguf.GGML_QUANT_SIZES[self.kind][0] == 0
        return self.kind if fits or self.narrow is None else self.narrow


def _is_matrix(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def _stored(numbers: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Returns the bytes of rows."""
    if kind.name not in BLOCKS:
        return gguf.quantize(numbers, kind)
    parts = BLOCKS[kind.name](numbers.reshape(-1, gguf.GGML_QUANT_SIZES[kind][0]).astype(np.float64))
    return np.concatenate(parts, axis=1).reshape(len(numbers), -1)


def _row_order(config: Any, name: str, num_rows: int) -> Tensor:
    """Returns which of the model's rows each of the file's is: numbers that are rotated together lie side by side."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return torch.arange(num_rows)
    return torch.arange(num_rows).view(-1, 2, config.head_dim // 2).transpose(1, 2).flatten()


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(0x100 + index) for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges([])
    writer.add_eos_token_id(config.eos_token_id)
