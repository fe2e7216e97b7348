"""An EAGLE-3 head (Li et al. 2025), which drafts for the model that it was trained with.

It is one decoder layer that reads each token's embedding beside a hidden state, both after a norm: first one that a
projection makes of the inputs of several layers of the model at the token before, then the layer's own output. Its
language-model head has the tokens that are drafted most, which `d2t` maps to those of the model.

Files are as the `speculators` package writes them, or as EAGLE's own training does (`midlayer`).
"""

import copy
import hashlib
import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from engine.attention import registry
from engine.attention.kv_cache import LayerShape
from engine.checkpoint.hub import optional_file
from engine.checkpoint.local import is_head, read_config
from engine.checkpoint.safetensors_files import read_wanted
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, ModelError
from engine.core.machine import ModelSize
from engine.model.content_digest import add_content
from engine.model.filled_parameters import fill_parameters
from engine.model.kv_cache_dtype import choose_kv_dtype
from engine.model.loading.preparation import made_to_run, move_layers, replace_parts, unmap_checkpoint
from engine.model.probe import layer_shape, probe_layers
from engine.model.step_work import size_of
from engine.runner.forward import HeadInput
from engine.runner.loaded_model import DraftModel, LoadedModel
from engine.weights.linear import prepare_linears

__all__ = ["find_head_config", "load_eagle_head"]

_KINDS: dict[str, tuple[type[Any], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
"""Type of the head's layer -> its classes."""
_UNUSED = re.compile(r"^(?:t2d$|verifier_)")
"""Finds names of what training needs: which tokens are mapped, and parts of the model."""


def find_head_config(draft_model: str) -> dict[str, Any] | None:
    """Returns the configuration of a checkpoint that has a head, not a model; None for one that has a model."""
    path = optional_file(draft_model, None, "config.json")
    config = {} if path is None else read_config(path.parent)
    return config if is_head(config) else None


def load_eagle_head(config: EngineConfig, target: LoadedModel, head_config: Mapping[str, Any]) -> DraftModel:
    """Loads the head `config.draft_model`, whose configuration `find_head_config` has found, to draft for `target`.

    Raises ConfigError if it cannot draft for that model, ModelError if it is damaged.
    """
    assert config.draft_model is not None
    try:
        return _load(config, target, head_config)
    except _Unfit as error:
        raise ConfigError(f"--draft-model {config.draft_model} {error}.") from None
    except ModelError as error:
        raise ModelError(f"The head {config.draft_model} cannot be loaded: {error}") from error


class _Unfit(Exception):
    """Why a head cannot draft for the model."""


def _load(config: EngineConfig, target: LoadedModel, head_config: Mapping[str, Any]) -> DraftModel:
    layer_config = _layer_config(target, head_config)
    module = _new_module(layer_config, target.dtype, bool(head_config.get("norm_before_residual")))
    tensors = _tensors(str(config.draft_model))
    token_ids = _token_ids(tensors.pop("d2t", None), tensors, target.vocab_size)
    own_embeddings = tensors.pop("model.embed_tokens.weight", None)
    join = EagleInput(_input_layers(target, head_config), target.hidden_size, target.dtype)
    join.fill(tensors.pop("model.fc.weight"))
    module.lm_head = nn.Linear(target.hidden_size, len(tensors["lm_head.weight"]), bias=False, dtype=target.dtype)
    placeholder = module.get_input_embeddings().weight
    fill_parameters(module, tensors | {"model.embed_tokens.weight": placeholder.detach().clone()})
    size, layers = _made_to_draft(config, target, module, join)
    module.set_input_embeddings(_embeddings(target, own_embeddings))
    decoder = cast(Any, module.base_model)
    module.set_output_embeddings(EagleHead(decoder.norm, module.lm_head, token_ids, target.vocab_size))
    decoder.norm = nn.Identity()  # within the head, whose input is what the next pass reads
    return DraftModel(module, size, layers, join)


def _made_to_draft(
    config: EngineConfig, target: LoadedModel, module: PreTrainedModel, join: "EagleInput"
) -> tuple[ModelSize, tuple[LayerShape, ...]]:
    """Packs and places the head; returns the size of a pass, and the shapes of its KV."""
    made_to_run(module, target.device)
    join.requires_grad_(False).to(target.device)
    calls = probe_layers(module, target.device)
    replace_parts(module, calls, target.device, target.has_kernels)
    for part in (module, join):
        prepare_linears(part, target.has_kernels, config.draft_quantization)
    unmap_checkpoint(module)
    move_layers((module,), target.device)
    layers = tuple(layer_shape(call) for call in calls)
    choose_kv_dtype(config.kv_cache_dtype, target.dtype, "the head", layers)
    return size_of(module, calls, target.kv_dtype), layers


def _layer_config(target: LoadedModel, head_config: Mapping[str, Any]) -> Any:
    """Returns the configuration of the head's layer. Raises _Unfit."""
    kind = head_config.get("speculators_model_type") or "eagle3"
    if kind != "eagle3":
        raise _Unfit(f"is a head of the kind {kind!r}; heads of the kind eagle3 can be served")
    own = head_config.get("transformer_layer_config", head_config)
    if own.get("model_type") not in _KINDS:
        known = " or ".join(_KINDS)
        raise _Unfit(f"has a layer of {own.get('model_type')!r}; heads with layers of {known} can be served")
    if own.get("num_hidden_layers", 1) != 1:
        raise _Unfit(f"has {own['num_hidden_layers']} layers; heads with one can be served")
    if own.get("hidden_size") != target.hidden_size:
        raise _Unfit(f"has hidden states of {own.get('hidden_size')} numbers, not the model's {target.hidden_size}")
    vocab_size = own.get("vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise _Unfit(f"is for a vocabulary of {vocab_size:,} tokens, not the model's {target.vocab_size:,}")
    if head_config.get("norm_before_fc"):
        raise _Unfit("has a norm before its projection (norm_before_fc), which is not known here")
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    fields = {**own, **no_tokens, "vocab_size": 1, "tie_word_embeddings": False}
    return _KINDS[own["model_type"]][0].from_dict(fields)


def _input_layers(target: LoadedModel, head_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the layers of the model whose inputs the head reads. Raises _Unfit."""
    own = head_config.get("eagle_config") or {}
    layers = head_config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
    text_config = target.module.config.get_text_config(decoder=True)
    num_layers = text_config.num_hidden_layers
    for name in ("hc_mult", "hc_count"):
        if getattr(text_config, name, 1) > 1:
            raise _Unfit(f"reads hidden states of layers, and those of this model have several streams ({name})")
    layers = layers or [2, num_layers // 2, num_layers - 3]
    is_known = len(getattr(target.module.base_model, "layers", ())) == num_layers
    in_order = all(isinstance(layer, int) for layer in layers) and [*layers] == sorted({*layers})
    if not is_known or not in_order or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise _Unfit(f"reads the layers {layers} of a model, which cannot be read of one of {num_layers}")
    return tuple(layers)


def _new_module(layer_config: Any, dtype: torch.dtype, is_normed_residual: bool) -> PreTrainedModel:
    """Returns a model of one layer that reads embeddings and hidden states beside each other."""
    kind = _KINDS[layer_config.model_type][1]
    module = cast(Any, kind)._from_config(layer_config, dtype=dtype, attn_implementation=registry.ATTENTION_NAME)
    module.set_input_embeddings(nn.Embedding(1, 2 * layer_config.hidden_size, dtype=dtype))
    module.model.layers[0] = EagleLayer(module.model.layers[0], is_normed_residual)
    return cast(PreTrainedModel, module)


def _tensors(draft_model: str) -> dict[str, Tensor]:
    """Returns the head's tensors, named as in the module. Raises ModelError."""
    found = read_wanted(lambda name: optional_file(draft_model, None, name), lambda name: not _UNUSED.search(name))
    tensors = {_own_name(name): tensor for name, tensor in found.items()}
    for name in ("lm_head.weight", "model.fc.weight"):
        if name not in tensors:
            raise ModelError(f"no safetensors file has its {name.removeprefix('model.')}.")
    return tensors


def _own_name(name: str) -> str:
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return name if name == "d2t" or name.startswith("lm_head.") else f"model.{name}"


def _token_ids(offsets: Tensor | None, tensors: Mapping[str, Tensor], vocab_size: int) -> Tensor | None:
    """Returns the model's ids of the head's tokens; None if they have the same. Raises _Unfit."""
    num_drafted = len(tensors["lm_head.weight"])
    if offsets is None and num_drafted == vocab_size:
        return None
    if offsets is None or offsets.shape != (num_drafted,) or offsets.dtype.is_floating_point:
        raise _Unfit(f"drafts {num_drafted:,} tokens and does not tell which of the model's they are (d2t)")
    token_ids = torch.arange(num_drafted) + offsets.to(torch.int64)
    if len({*token_ids.tolist()}) < num_drafted or not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise _Unfit(f"drafts tokens that the model's {vocab_size:,} do not have, or some twice (d2t)")
    return token_ids


def _embeddings(target: LoadedModel, own: Tensor | None) -> nn.Module:
    """Returns the head's embeddings, which are the model's unless it has others. Raises _Unfit."""
    shared: nn.Module = target.module.get_input_embeddings()
    if own is None:
        return shared
    if own.shape != (target.vocab_size, target.hidden_size):
        raise _Unfit(f"has embeddings of the shape {[*own.shape]}, not {[target.vocab_size, target.hidden_size]}")
    own = own.to(target.device, target.dtype)  # which is not compared where the model's is divided among ranks
    if isinstance(shared.weight, Tensor) and torch.equal(shared.weight, own):
        return shared
    return nn.Embedding(own.shape[0], own.shape[1], _weight=own, _freeze=True)


class EagleInput(HeadInput):
    """Makes the head's input."""

    def __init__(self, layers: tuple[int, ...], hidden_size: int, dtype: torch.dtype) -> None:
        """`layers` are those of the model whose inputs the head reads."""
        super().__init__()
        self.hidden_of = layers
        self.projection = nn.Linear(len(layers) * hidden_size, hidden_size, bias=False, dtype=dtype)

    def fill(self, weight: Tensor) -> None:
        """Takes the weight [H, num_layers * H] of the projection. Raises ModelError for one of another shape."""
        fill_parameters(self, {"projection.weight": weight})
        digest = hashlib.sha256(repr(self.hidden_of).encode())
        add_content(digest, self.projection.weight)
        self.fingerprint = digest.hexdigest()[:32]

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:  # [T, H], [T, H] -> [T, 2 H]
        return torch.cat((embeddings, hidden), dim=-1)

    def kept_of(self, hidden: Tensor) -> Tensor:  # [T, num_layers * H] -> [T, H]
        return cast(Tensor, self.projection(hidden))


class EagleLayer(nn.Module):
    """A decoder layer whose input has embeddings and hidden states beside each other."""

    def __init__(self, layer: Any, is_normed_residual: bool) -> None:
        """Takes the parts of `layer`; `is_normed_residual` has the hidden states go on as the norm makes them."""
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.hidden_norm = layer.input_layernorm, copy.deepcopy(layer.input_layernorm)
        self.post_attention_layernorm = layer.post_attention_layernorm
        self._is_normed_residual = is_normed_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            sizes, dtype = (2 * narrow.in_features, narrow.out_features), narrow.weight.dtype
            setattr(self.self_attn, name, nn.Linear(*sizes, bias=narrow.bias is not None, dtype=dtype))

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:  # [..., 2 H] -> [..., H]
        embeddings, hidden = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(hidden)
        residual = normed if self._is_normed_residual else hidden
        attended, _ = self.self_attn(
            hidden_states=torch.cat((self.input_layernorm(embeddings), normed), dim=-1), **arguments
        )
        residual = residual + attended
        return cast(Tensor, residual + self.mlp(self.post_attention_layernorm(residual)))


class EagleHead(nn.Module):
    """The final norm and the language-model head, whose tokens get their places among the model's."""

    def __init__(self, norm: nn.Module, head: nn.Module, token_ids: Tensor | None, vocab_size: int) -> None:
        """`token_ids` are the model's ids of the head's tokens; None if they have the same."""
        super().__init__()
        self.norm, self.head = norm, head
        self._token_ids, self._vocab_size = token_ids, vocab_size

    def forward(self, hidden: Tensor) -> Tensor:  # [..., H] -> [..., vocab_size]
        scores = self.head(self.norm(hidden))
        if self._token_ids is None:
            return cast(Tensor, scores)
        logits = scores.new_full((*scores.shape[:-1], self._vocab_size), -torch.inf)
        logits[..., self._token_ids] = scores
        return cast(Tensor, logits)
