"""A checkpoint's own MTP head (multi-token prediction: DeepSeek-V3, 2024), which drafts for its model.

It is one layer more, of the model's own kind, on what a projection makes of a token's embedding and the hidden state of
the token before it, each after a norm; embeddings and language-model head are the model's. Transformers does not load
it. Here it becomes a model of the same class with that one layer, whose keys and values lie in the blocks of the
model's. Position 0, before which there is no hidden state, reads zeros in its place.

The names of its tensors are those that vLLM, SGLang and transformers know; of several heads for one token more each,
the first is used for all.
"""

import copy
import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention import registry
from engine.checkpoint.weight_source import brings_head, brings_unknown_head, weights_beside
from engine.core.config import EngineConfig
from engine.core.errors import ModelError, TwostepError, reason_of
from engine.host.available_memory import is_memory_shortage
from engine.model.drafting.kernel_head import JoinParts
from engine.model.filled_parameters import fill_parameters
from engine.model.fused_modules import FusedRMSNorm
from engine.model.fusion import fuse_rms_norms
from engine.model.known.linears import is_known_linear, parts_of_linear
from engine.model.known.norms import norm_parts
from engine.model.latent_attention import has_latents, keep_latents
from engine.model.loading.preparation import made_to_run, move_layers, only_errors_of, replace_parts, unmap_checkpoint
from engine.model.probe import layer_shape, probe
from engine.model.sparse_attention import replace_indexers
from engine.model.step_work import size_of
from engine.model.text_part import TEXT_PART_NAMES
from engine.runner.forward import HeadInput
from engine.runner.loaded_model import DraftModel, LoadedModel
from engine.weights.linear import prepare_linears

__all__ = ["MtpInput", "join_parts", "load_mtp_head"]

logger = logging.getLogger(__name__)

_JOIN = "join."
_SHARED = re.compile(r"(?:^|\.)(?:embed_tokens|shared_head\.head|lm_head)\.")
"""Finds names of what is the model's: embeddings and language-model head."""


class _Layout(NamedTuple):
    """How the tensors of a head are called: a prefix, and after it the names of its parts; others are its layer's."""

    prefix: str
    """With the model's number of layers for `{}`."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str = ""
    is_hidden_first: bool = False
    """Whether the projection reads the hidden state before the embedding."""

    def name_of(self, name: str) -> str:
        """Returns what a tensor, named without the prefix, is called in the model of one layer."""
        parts = {self.embedding_norm: "embedding_norm", self.hidden_norm: "hidden_norm", self.projection: "projection"}
        part, _, kind = name.rpartition(".")
        if part in parts:
            return f"{_JOIN}{parts[part]}.{kind}"
        if part == self.norm:
            return f"model.norm.{kind}"
        return f"model.layers.0.{name.removeprefix(self.layer)}"


_LAYOUTS = (
    # DeepSeek-V3, GLM-4.5 and later
    _Layout("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    # Qwen3-Next, Qwen3.5, Mellum
    _Layout("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    # MiMo
    _Layout(
        *("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        is_hidden_first=True,
    ),
)


class MtpInput(HeadInput):
    """Makes a head's input of tokens' embeddings and the hidden states before them."""

    def __init__(self, norm: nn.Module, hidden_size: int, dtype: torch.dtype, is_hidden_first: bool) -> None:
        """`norm` is one of the kind that it has, of the same size."""
        super().__init__()
        self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False, dtype=dtype)
        self.is_hidden_first = is_hidden_first

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:  # [T, H], [T, H] -> [T, H]
        parts = self.embedding_norm(embeddings), self.hidden_norm(hidden)
        return cast(Tensor, self.projection(torch.cat(parts[::-1] if self.is_hidden_first else parts, dim=-1)))


def join_parts(join: MtpInput) -> JoinParts | None:
    """Returns the parts of a head's input; None unless the kernels know all of them."""
    one, other, projection = join.embedding_norm, join.hidden_norm, join.projection
    if isinstance(one, FusedRMSNorm) and isinstance(other, FusedRMSNorm) and is_known_linear(projection):
        return JoinParts(norm_parts(one), norm_parts(other), parts_of_linear(projection), join.is_hidden_first)
    return None


def load_mtp_head(config: EngineConfig, model: LoadedModel) -> DraftModel | None:
    """Returns the head of the checkpoint of `model`, which was loaded; None if it has none or none is wanted. So it is,
    with a warning, for one that does not fit: answers do not depend on it."""
    if not config.may_load_head:
        return None
    if not brings_head(config.model, config.revision):
        if brings_unknown_head(config.model, config.revision):
            logger.info("%s drafts without its MTP layers: their form is not known here", config.model)
        return None
    try:
        return _load(config, model)
    except Exception as error:  # a checkpoint's values reach code all over transformers, which raises anything
        if is_memory_shortage(error):
            raise
        reason = str(error) if isinstance(error, TwostepError) else f"{type(error).__name__}: {reason_of(error)}."
        logger.warning("%s drafts without its MTP head, which cannot be loaded: %s", config.model, reason)
        return None


def _load(config: EngineConfig, model: LoadedModel) -> DraftModel | None:
    num_layers = model.module.config.get_text_config(decoder=True).num_hidden_layers
    prefixes = tuple(layout.prefix.format(num_layers) for layout in _LAYOUTS)
    found = weights_beside(
        config.model, config.revision, model.dtype, lambda name: _own_name(name).startswith(prefixes)
    )
    tensors = {_own_name(name): tensor for name, tensor in found.items()}
    for prefix, layout in zip(prefixes, _LAYOUTS, strict=True):
        if f"{prefix}{layout.projection}.weight" in tensors:
            own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
            renamed = {layout.name_of(name): each for name, each in own.items() if not _SHARED.search(name)}
            return _build(config, model, layout, renamed)
    return None


def _own_name(name: str) -> str:
    """Returns what a tensor of the text part of a checkpoint is called in a checkpoint of such a model alone."""
    for pattern, replacement in TEXT_PART_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def _build(config: EngineConfig, model: LoadedModel, layout: _Layout, tensors: Mapping[str, Tensor]) -> DraftModel:
    if getattr(model.module.config, "hc_count", 1) > 1:
        raise ModelError("It is one for models with several streams, whose form is not known here.")
    module = _model_of_one_layer(model, {n: tensor for n, tensor in tensors.items() if not n.startswith(_JOIN)})
    norm = cast(nn.Module, cast(Any, module.base_model).norm)
    join = MtpInput(norm, model.hidden_size, model.dtype, layout.is_hidden_first).to(model.device)
    fill_parameters(join, {n.removeprefix(_JOIN): tensor for n, tensor in tensors.items() if n.startswith(_JOIN)})
    if model.device.type == "cpu" and model.has_kernels:
        fuse_rms_norms(join, model.dtype)
    replace_indexers(module)
    if has_latents(model.module):
        keep_latents(module, model.kv_dtype)
    calls, states = probe(module, model.device)
    if states:
        raise ModelError("Its layer has a recurrent state.")
    replace_parts(module, calls, model.device, model.has_kernels)
    reports = [prepare_linears(part, model.has_kernels, config.quantization) for part in (module, join)]
    unmap_checkpoint(module)
    move_layers((module,), model.device)
    # Last: what several ranks have parts of they run together, and one of them may not have come so far.
    module.set_input_embeddings(model.module.get_input_embeddings())
    module.set_output_embeddings(model.module.get_output_embeddings())
    size = size_of(module, calls, model.kv_dtype)
    size = msgspec.structs.replace(
        size,
        layer_bytes=size.layer_bytes + reports[1].packed_bytes,
        layer_flops=size.layer_flops + 4 * model.hidden_size**2,
    )
    return DraftModel(module, size, tuple(layer_shape(call) for call in calls), join)


def _model_of_one_layer(model: LoadedModel, tensors: dict[str, Tensor]) -> PreTrainedModel:
    """Returns a model of the same class with the head's layer, and next to nothing in the place of embeddings and
    language-model head."""
    kind = type(model.module)
    with only_errors_of("transformers.modeling_utils"), only_errors_of("transformers.distributed"):
        module, info = kind.from_pretrained(
            None,
            config=_config_of_one_layer(model.module.config),
            state_dict=tensors,
            dtype=model.dtype,
            attn_implementation=registry.ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    if missing := sorted(name for name in info["missing_keys"] if not _SHARED.search(name)):
        raise ModelError(f"{len(missing)} of its tensors, such as {missing[0]}, lack.")
    if mismatched := list(info["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        raise ModelError(f"{name} has the shape {list(shape)}, not {list(expected)}.")
    if unused := sorted(info["unexpected_keys"]):
        raise ModelError(
            f"{len(unused)} of its tensors, such as {unused[0]}, have no place in a layer of {kind.__name__}."
        )
    return made_to_run(module, model.device)


def _config_of_one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of a model with the head's layer alone: of the kind that the configuration says, else
    of that of the last layer."""
    config = copy.deepcopy(config)
    num_layers = config.num_hidden_layers
    for name, value in [*vars(config).items()]:
        if isinstance(value, list) and len(value) == num_layers:
            own = getattr(config, f"mtp_{name}", None) or value[-1:]
            setattr(config, name, own[:1])
    config.num_hidden_layers = config.vocab_size = 1
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return config
