"""Loads a Hugging Face checkpoint into a module that runs over the paged cache, or refuses it with a clear reason."""

import logging
from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention import registry
from engine.attention.kv_cache import LayerShape
from engine.attention.registry import AttentionCall
from engine.checkpoint.eos_tokens import find_eos_token_ids
from engine.checkpoint.local import check_checkpoint, is_local
from engine.core.config import EngineConfig
from engine.core.errors import (
    ConfigError,
    ModelError,
    ModelMemoryError,
    TwostepError,
    UnsupportedModelError,
    reason_of,
)
from engine.host.available_memory import is_memory_shortage
from engine.host.mkl_warmup import warm_up_vector_functions
from engine.model.context_limit import context_limit
from engine.model.drafting.self_draft import draft_model_of
from engine.model.kv_cache_dtype import choose_kv_dtype
from engine.model.loading.hf_config import read_hf_config
from engine.model.loading.layers import prove_layers
from engine.model.loading.placement import Placement, place_model
from engine.model.loading.preparation import move_layers, replace_parts, unmap_checkpoint
from engine.model.loading.weights import load_module
from engine.model.probe import layer_shape
from engine.model.refusals import advice_about_transformers
from engine.model.step_work import size_of
from engine.model.tensor_parallel import check_same_weights, cut_modules, leave_weights_stored
from engine.runner.loaded_model import DraftModel, LoadedModel
from engine.weights.linear import prepare_linears
from engine.weights.rank_group import ALONE, RankGroup

__all__ = ["load_model"]

logger = logging.getLogger(__name__)


def load_model(config: EngineConfig, group: RankGroup = ALONE) -> LoadedModel:
    """Loads the configured model, or the part of a rank. Raises ConfigError, ModelError or UnsupportedModelError, each
    saying what to do."""
    check_checkpoint(config.model)
    try:
        return _load(config, group)
    except TwostepError:
        raise
    except Exception as error:  # a checkpoint's values reach code all over transformers, which raises anything
        logger.debug("loading the checkpoint failed", exc_info=True)
        raise _refusal(config.model, error) from error


def _refusal(model: str, error: Exception) -> ModelError:
    """Returns the error that says what to do about another one's cause."""
    reason = f"{type(error).__name__}: {reason_of(error) or 'no details'}"
    if is_memory_shortage(error):
        return ModelMemoryError(
            f"There is not enough memory to load {model}: {reason} Free some, or serve a smaller model."
        )
    if isinstance(error, (SafetensorError, EOFError)):  # a RuntimeError may come from a driver or a download
        return ModelError(f"The checkpoint {model} is damaged: {reason}")
    if registry.ATTENTION_NAME in str(error):  # the model looked the name up in a table of its own
        return UnsupportedModelError(
            f"The model {model} does not use transformers' attention registry, so it cannot run over a paged cache."
        )
    hint = "" if is_local(model) else " Give a checkpoint directory, or a hub id this machine can reach."
    return ModelError(f"The checkpoint {model} cannot be loaded: {reason}{hint}{advice_about_transformers(error)}")


def _load(config: EngineConfig, group: RankGroup) -> LoadedModel:
    warm_up_vector_functions()
    served = read_hf_config(config)
    place = place_model(config, served.hf_config, group)
    module, fingerprint = load_module(config, served, place)
    check_same_weights(config.model, fingerprint, group)
    calls, states = prove_layers(config, module, place)
    leave_weights_stored(module, group)
    kv_dtype = _kv_dtype(config, module, calls, place)
    replace_parts(module, calls, place.device, place.has_kernels)
    draft: DraftModel | None = None
    if config.is_self_speculative:
        draft = draft_model_of(module, calls, kv_dtype, config.draft_quantization, place)
    packed_bytes = _pack_linears(config, module, place)
    unmap_checkpoint(module)
    calls, *_ = move_layers((module, draft.module) if draft else (module,), place.device)
    text_config = module.config.get_text_config(decoder=True)
    return LoadedModel(
        module=module,
        layers=_shapes_of(calls),
        states=states,
        device=place.device,
        dtype=place.dtype,
        kv_dtype=kv_dtype,
        architecture=type(module).__name__,
        vocab_size=_num_tokens(text_config),
        hidden_size=text_config.hidden_size,
        max_model_len=context_limit(text_config, states),
        eos_token_ids=_eos_token_ids(config, text_config),
        weights_fingerprint=fingerprint,
        weight_bytes=packed_bytes + sum(p.nbytes for p in module.parameters()),
        size=size_of(module, calls, kv_dtype),
        linear=_linear_name(config, place),
        has_kernels=place.has_kernels,
        draft=draft,
    )


def _shapes_of(calls: Sequence[AttentionCall]) -> tuple[LayerShape, ...]:
    return tuple(map(layer_shape, calls))


def _kv_dtype(
    config: EngineConfig, module: PreTrainedModel, calls: Sequence[AttentionCall], place: Placement
) -> torch.dtype:
    layers = _shapes_of(calls)
    return choose_kv_dtype(config.kv_cache_dtype, place.dtype, type(module).__name__, layers)


def _pack_linears(config: EngineConfig, module: PreTrainedModel, place: Placement) -> int:
    """Packs what is multiplied; returns the bytes that it takes now. Raises ConfigError where no weight is as
    `--gguf-activations` wants it."""
    rounds_rows = config.gguf_activations == "int8"
    cuts = cut_modules(module, place.group)
    report = prepare_linears(module, place.has_kernels, config.quantization, place.group, cuts, rounds_rows)
    if rounds_rows and not report.has_rounded_rows:
        raise ConfigError(
            "--gguf-activations int8 is for weights that the CPU kernels multiply in the blocks of a GGUF file, and "
            f"{config.model} has none here: leave it out, or --dtype and --quantization."
        )
    for name in report.unconverted:
        logger.warning("batch invariance is not guaranteed: %s is multiplied by torch", name)
    return report.packed_bytes


def _linear_name(config: EngineConfig, place: Placement) -> str:
    isa = f"twostep {place.kernels.isa}" if place.kernels else "torch, fixed tiles"
    backend = "Triton" if place.device.type == "cuda" else isa
    if config.gguf_activations != "float32":
        return f"{backend}, {config.gguf_activations} activations"
    return backend if config.quantization == "none" else f"{backend}, {config.quantization} weights"


def _eos_token_ids(config: EngineConfig, text_config: PreTrainedConfig) -> tuple[int, ...]:
    usual = getattr(text_config, "eos_token_id", None)
    return find_eos_token_ids(config.model, config.revision, _num_tokens(text_config), usual)


def _num_tokens(text_config: PreTrainedConfig) -> int:
    """Returns how many tokens have a logit: in some models the last rows of the head are of none."""
    num_rows = int(text_config.vocab_size)
    return min(num_rows, getattr(text_config, "unpadded_vocab_size", None) or num_rows)
