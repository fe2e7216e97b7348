"""Makes a checkpoint with the output of the embedded model and the step time of a large one.

Trained weights agree with their quantized copy as random ones do not, and the trained ones at hand are small. So they
are put into a corner of larger matrices, and everything else that is computed is multiplied by zero before it counts.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import engine

MTP_HEAD = Path(engine.__file__).parent / "embedded_model" / "mtp.safetensors"
"""The MTP head of the embedded model."""
_LAYER = "mtp.layers.0."  # before the names of the tensors of a head's layer
_WIDER = 4  # a whole square, so that norms over zeros differ by a factor that is exact
_STD = 0.03  # of the weights that do not count, about as large as that of the trained ones


def save_padded_model(source: Path, directory: Path, num_layers: int = 14, head: Path | None = None) -> None:
    """Saves a padded copy of `source`, a small Llama; the embedded model becomes 0.36 B parameters with 14 layers. With
    the file of its MTP head, the copy has a padded one, too."""
    small: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    torch.manual_seed(0)
    large: Any = LlamaForCausalLM(_padded_config(small.config, num_layers)).to(torch.bfloat16)
    with torch.no_grad():
        _put(large.model.embed_tokens.weight.zero_(), small.model.embed_tokens.weight)
        _put_norm(large.model.norm, small.model.norm)
        for index, layer in enumerate(large.model.layers):
            _fill(layer, small.model.layers[index] if index < len(small.model.layers) else None)
        tensors = {} if head is None else _padded_head(small.config, large.config, load_file(head))
    large.save_pretrained(directory, state_dict=large.state_dict() | tensors)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, directory)


def randomize(directory: Path) -> None:
    """Replaces all matrices of the checkpoint in `directory` by random numbers, the same ones in every call."""
    file = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor.normal_(std=_STD, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})


def _padded_config(config: Any, num_layers: int) -> LlamaConfig:
    wider = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    values = {**config.to_dict(), "num_hidden_layers": num_layers, "rms_norm_eps": config.rms_norm_eps / _WIDER}
    return LlamaConfig(**values | {name: _WIDER * getattr(config, name) for name in wider})


def _padded_head(small: Any, large: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a padded head, of models with these configurations."""
    own, layer = (LlamaDecoderLayer(config, 0).to(torch.bfloat16) for config in (small, large))
    own.load_state_dict({n.removeprefix(_LAYER): each for n, each in tensors.items() if n.startswith(_LAYER)})
    _fill(layer, own)
    padded = {f"{_LAYER}{name}": each for name, each in layer.state_dict().items()}
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and not name.startswith(_LAYER):
            padded[name] = torch.ones(large.hidden_size, dtype=tensor.dtype)
            padded[name][: len(tensor)] = tensor / _WIDER**0.5
    projection = torch.zeros(large.hidden_size, 2 * large.hidden_size, dtype=torch.bfloat16)
    for wide, narrow in zip(projection.chunk(2, dim=1), tensors["mtp.fc.weight"].chunk(2, dim=1), strict=True):
        _put(wide, narrow)
    return padded | {"mtp.fc.weight": projection}


def _fill(layer: Any, small: Any | None) -> None:
    """Fills a layer such that it adds to the residual what `small` adds, or nothing without one."""
    for linear in _linears(layer):
        linear.weight.normal_(std=_STD)
    for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
        module.weight.zero_()
    if small is None:
        return
    for linear, own in zip(_linears(layer), _linears(small), strict=True):
        _put(linear.weight, own.weight)
    _put_norm(layer.input_layernorm, small.input_layernorm)
    _put_norm(layer.post_attention_layernorm, small.post_attention_layernorm)


def _linears(layer: nn.Module) -> Iterator[nn.Linear]:
    return (module for module in layer.modules() if isinstance(module, nn.Linear))


def _put(large: Tensor, small: Tensor) -> None:
    """Copies `small` into the first rows and columns of `large`."""
    large[: small.shape[0], : small.shape[1]] = small


def _put_norm(large: Any, small: Any) -> None:
    """Copies a norm's weight, scaled down: the mean square of a row with three zeros to each number is a quarter."""
    large.weight[: len(small.weight)] = small.weight / _WIDER**0.5
