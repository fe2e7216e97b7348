"""Loads a Hugging Face checkpoint into a module that runs over the paged cache, or refuses it with a clear reason."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from engine.attention import registry
from engine.attention.kv_cache import LayerShape
from engine.attention.registry import AttentionCall
from engine.checkpoint.config_numbers import check_numbers
from engine.checkpoint.eos_tokens import find_eos_token_ids
from engine.checkpoint.local import (
    check_checkpoint,
    check_model_type,
    folder_of,
    is_local,
    read_config,
)
from engine.checkpoint.published.scheme import check_scheme
from engine.checkpoint.weight_source import needs_float32, stored_weights
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
from engine.host.nvidia import cuda_build_advice
from engine.kernels import KernelInfo, load_kernels
from engine.kernels.cpu_features import has_native_bf16
from engine.mixers.functions import route_recurrent_functions
from engine.mixers.state import StateShape
from engine.model.context_limit import context_limit
from engine.model.drafting.self_draft import draft_model_of
from engine.model.dummy_weights import dummy_fingerprint, dummy_model
from engine.model.finite_weights import check_finite
from engine.model.kv_cache_dtype import choose_kv_dtype, kv_dtype_named
from engine.model.latent_attention import are_expanded_by, expand_latents, keep_latents
from engine.model.paging_proof import prove_paging
from engine.model.placement import made_to_run, move_layers, only_errors_of, replace_parts, unmap_checkpoint
from engine.model.plain_type import as_plain_type
from engine.model.planning.paged_weights import check_packing_fits
from engine.model.probe import ProbedLayers, layer_shape, probe
from engine.model.recurrent.replacement import replace_recurrent_layers
from engine.model.sparse_attention import check_sparse, is_sparse, replace_indexers
from engine.model.step_work import size_of
from engine.model.tensor_parallel import check_heads, check_same_weights, cut_modules, leave_weights_stored
from engine.model.text_part import TEXT_PART_NAMES, has_text_part, text_part_of
from engine.model.weight_count import check_weight_count
from engine.model.weights_fingerprint import weights_fingerprint
from engine.model.written_dtype import dtype_override
from engine.runner.loaded_model import DraftModel, LoadedModel
from engine.weights.linear import LinearReport, prepare_linears
from engine.weights.packing_policy import check_quantization
from engine.weights.rank_group import ALONE, RankGroup

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
        if is_memory_shortage(error):
            raise ModelMemoryError(
                f"There is not enough memory to load {config.model}: {_describe(error)} "
                "Free some, or serve a smaller model."
            ) from error
        if isinstance(error, (SafetensorError, EOFError)):  # a RuntimeError may come from a driver or a download
            raise ModelError(f"The checkpoint {config.model} is damaged: {_describe(error)}") from error
        if registry.ATTENTION_NAME in str(error):  # the model looked the name up in a table of its own
            raise UnsupportedModelError(
                f"The model {config.model} does not use transformers' attention registry, "
                "so it cannot run over a paged cache."
            ) from error
        hint = "" if is_local(config.model) else " Give a checkpoint directory, or a hub id this machine can reach."
        raise ModelError(f"The checkpoint {config.model} cannot be loaded: {_describe(error)}{hint}") from error


def _load(config: EngineConfig, group: RankGroup) -> LoadedModel:
    warm_up_vector_functions()
    source: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    hf_config, names = read_hf_config(config, source)
    source |= {"config": hf_config, "key_mapping": names}
    device = _device(config.device)
    config.check_device(device.type)
    check_quantization(config.quantization, device)
    kernels = _load_kernels(config) if device.type == "cpu" else None
    dtype = _dtype(config, device, hf_config, kernels)
    module, fingerprint = _module_of(config, source, device, dtype, kernels is not None)
    check_same_weights(config.model, fingerprint, group)
    text_config = hf_config.get_text_config(decoder=True)
    calls, states = _checked_layers(config, module, text_config, device, dtype, group)
    leave_weights_stored(module, group)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype, device, type(module).__name__, _shapes_of(calls))
    replace_parts(module, calls, device, kernels is not None)
    draft = _self_draft(config, module, calls, kernels is not None, kv_dtype, group)
    report = _prepare_linears(config, module, kernels is not None, group)
    unmap_checkpoint(module)
    calls, *_ = move_layers((module, draft.module) if draft else (module,), device)
    return LoadedModel(
        module=module,
        layers=_shapes_of(calls),
        states=states,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        architecture=type(module).__name__,
        vocab_size=text_config.vocab_size,
        hidden_size=text_config.hidden_size,
        max_model_len=context_limit(text_config, states),
        eos_token_ids=_eos_token_ids(config, text_config),
        weights_fingerprint=fingerprint,
        weight_bytes=report.packed_bytes + sum(p.nbytes for p in module.parameters()),
        size=size_of(module, calls, kv_dtype),
        linear=_linear_name(kernels, device, config),
        has_kernels=kernels is not None,
        draft=draft,
    )


def read_hf_config(config: EngineConfig, source: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, str] | None]:
    """Returns the configuration of the model to serve, which may be a part of the checkpoint, and what its tensors are
    called there; None if as in the model."""
    if is_local(config.model):
        check_model_type(read_config(folder_of(config.model)), config.model, config.trust_remote_code)
    place = str(folder_of(config.model)) if is_local(config.model) else config.model
    hf_config = AutoConfig.from_pretrained(place, **source, **dtype_override(config.model, config.revision))
    check_scheme(values := hf_config.to_dict(), config.model)
    check_numbers(values, config.model)
    _forget_scheme(hf_config)
    names = TEXT_PART_NAMES if has_text_part(hf_config) else None
    if names:
        logger.info("%s: of this multimodal checkpoint, the text model is served", config.model)
        hf_config = as_plain_type(text_part_of(hf_config))
    _check_architecture(hf_config, config)
    return hf_config, names


def _forget_scheme(hf_config: PreTrainedConfig) -> None:
    """Keeps transformers from replacing modules for weights that it shall not read."""
    for part in (hf_config, hf_config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            vars(part).pop(name, None)


def _shapes_of(calls: Sequence[AttentionCall]) -> tuple[LayerShape, ...]:
    return tuple(map(layer_shape, calls))


def _checked_layers(
    config: EngineConfig,
    module: PreTrainedModel,
    text_config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    group: RankGroup,
) -> ProbedLayers:
    """Returns the attention calls and the shapes of the states of all layers, of latents where the model can run over
    these. Raises UnsupportedModelError unless it can run paged."""
    route_recurrent_functions(module)
    replace_recurrent_layers(module)
    replace_indexers(module)
    is_expanded = device.type != "cpu" or bool(group.of_first(are_expanded_by(config.adapters)))
    replaced = {} if is_expanded else keep_latents(module, kv_dtype_named(config.kv_cache_dtype, dtype))
    if not replaced:
        return _proved_layers(config, module, text_config, device, group)
    layers = None
    try:
        layers = _proved_layers(config, module, text_config, device, group)
    except UnsupportedModelError as error:
        if is_sparse(module):
            raise
        logger.warning("keys and values of all heads are cached, not latents: %s", error)
    if not group.of_first(layers is not None):
        expand_latents(replaced)
        return _proved_layers(config, module, text_config, device, group)
    assert layers is not None, "what the first rank has proved holds for all"
    return layers


def _proved_layers(
    config: EngineConfig,
    module: PreTrainedModel,
    text_config: PreTrainedConfig,
    device: torch.device,
    group: RankGroup,
) -> ProbedLayers:
    calls, states = probe(module, device)
    _check_states(config, states, device)
    check_sparse(config.model, calls, device)
    check_heads(config.model, calls, group)
    if group.is_first:  # it holds for all
        with only_errors_of("transformers.integrations.hub_kernels"):  # it asks for packages that would not be used
            prove_paging(module, context_limit(text_config, states))
    return ProbedLayers(calls, states)


def _self_draft(
    config: EngineConfig,
    module: PreTrainedModel,
    calls: Sequence[AttentionCall],
    has_kernels: bool,
    kv_dtype: torch.dtype,
    group: RankGroup,
) -> DraftModel | None:
    if config.draft_model is not None or config.draft_quantization == "none":
        return None
    return draft_model_of(module, calls, has_kernels, config.draft_quantization, kv_dtype, group)


def _prepare_linears(
    config: EngineConfig, module: PreTrainedModel, has_kernels: bool, group: RankGroup
) -> LinearReport:
    rounds_rows = config.gguf_activations == "int8"
    cuts = cut_modules(module, group)
    report = prepare_linears(module, has_kernels, config.quantization, group, cuts, rounds_rows)
    if rounds_rows and not report.has_rounded_rows:
        raise ConfigError(
            "--gguf-activations int8 is for weights that the CPU kernels multiply in the blocks of a GGUF file, and "
            f"{config.model} has none here: leave it out, or --dtype and --quantization."
        )
    for name in report.unconverted:
        logger.warning("batch invariance is not guaranteed: %s is multiplied by torch", name)
    return report


def _linear_name(kernels: KernelInfo | None, device: torch.device, config: EngineConfig) -> str:
    backend = "Triton" if device.type == "cuda" else f"twostep {kernels.isa}" if kernels else "torch, fixed tiles"
    if config.gguf_activations != "float32":
        return f"{backend}, {config.gguf_activations} activations"
    return backend if config.quantization == "none" else f"{backend}, {config.quantization} weights"


def _describe(error: BaseException) -> str:
    """Returns the error's type and message on one line."""
    return f"{type(error).__name__}: {reason_of(error) or 'no details'}"


def _check_architecture(hf_config: PreTrainedConfig, config: EngineConfig) -> None:
    kind = hf_config.model_type
    if hf_config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; only decoder-only models can be served.")
    remote = config.trust_remote_code and hasattr(hf_config, "auto_map")
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            raise UnsupportedModelError(
                f"{kind} is a multimodal model whose text part is no model of its own to transformers, so it cannot be "
                "served; docs/models.md lists multimodal types of which it can."
            )
        raise UnsupportedModelError(f"{kind} is not a causal language model known to transformers.")


def _load_kernels(config: EngineConfig) -> KernelInfo | None:
    kernels = load_kernels()
    if kernels is None and config.require_kernels:
        raise ConfigError("--require-kernels: there are no CPU kernels here; the log says why.")
    return kernels


def _check_states(config: EngineConfig, states: Sequence[StateShape], device: torch.device) -> None:
    if states and device.type != "cpu":
        raise UnsupportedModelError(
            f"{config.model} has recurrent states, which are computed on the CPU only: use --device cpu."
        )
    if states and config.draft_model is None and config.draft_quantization != "none":
        raise ConfigError(
            f"--draft-quantization {config.draft_quantization}: {config.model} has recurrent states, which its rounded "
            "weights would need copies of; leave it out."
        )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        cure = cuda_build_advice() or "Look whether nvidia-smi finds one, or use --device cpu."
        raise ConfigError(f"--device cuda: torch sees no CUDA device. {cure}")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _dtype(
    config: EngineConfig, device: torch.device, hf_config: PreTrainedConfig, kernels: KernelInfo | None
) -> torch.dtype:
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        if chosen is torch.float32 and device.type == "cuda":
            logger.warning("--dtype float32 on a GPU: no tensor cores, steps are several times slower than in 16 bits")
        return chosen
    if config.load_format == "auto" and needs_float32(config.model, config.revision):
        return torch.float32
    if device.type == "cpu":
        widens = kernels is not None and kernels.isa != "generic"  # to float32, in the time that reading less saves
        return torch.bfloat16 if widens or has_native_bf16() else torch.float32
    own = hf_config.get_text_config(decoder=True).dtype
    return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16


def _module_of(
    config: EngineConfig, source: dict[str, Any], device: torch.device, dtype: torch.dtype, has_kernels: bool
) -> tuple[PreTrainedModel, str]:
    """Returns the model with its weights, or random ones, and their fingerprint."""
    registry.register()
    if config.load_format == "auto":
        check_weight_count(config, source["config"])
        if device.type == "cpu":
            check_packing_fits(config, source["config"])
        module = _load_weights(config, source, device, dtype, has_kernels)
        check_finite(module, config.model)
        return module, weights_fingerprint(module)
    logger.warning(
        "--load-format dummy: the weights of %s are random numbers, so its answers mean nothing", config.model
    )
    module = dummy_model(source["config"], dtype, device, config.trust_remote_code)
    return made_to_run(module, device), dummy_fingerprint(module, device)


def _load_weights(
    config: EngineConfig, source: dict[str, Any], device: torch.device, dtype: torch.dtype, has_kernels: bool
) -> PreTrainedModel:
    expander = torch.ops.twostep.expand_blocks if has_kernels else None
    weights = stored_weights(config.model, config.revision, dtype, expander)
    place: str | None = config.model
    kind = AutoModelForCausalLM
    if weights is not None:
        if type(source["config"]) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UnsupportedModelError("Models of a checkpoint's own code cannot be served from quantized weights.")
        kind, place = MODEL_FOR_CAUSAL_LM_MAPPING[type(source["config"])], None
        source = {"config": source["config"], "key_mapping": source["key_mapping"], "state_dict": weights}
    with only_errors_of("transformers.modeling_utils"), only_errors_of("transformers.distributed"):
        module, info = kind.from_pretrained(
            place,
            dtype=dtype,
            attn_implementation=registry.ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            **source,
        )
    _check_fit(config.model, module, info)
    return made_to_run(module, device)


def _check_fit(model: str, module: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raises ModelError unless the checkpoint has each of the model's tensors, and none that would change its results.

    Tensors of whole parts that are not used, such as multi-token prediction or a vision tower, are ignored. An unused
    tensor of a part that is used (a bias, the scales of quantized weights) would be missed in the results.
    """
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"The checkpoint {model} is incomplete: {len(missing)} tensors such as {missing[0]} lack.")
    if mismatched := list(info["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        raise ModelError(
            f"The weights of {model} do not fit its config.json: {name} has the shape {list(shape)}, "
            f"not {list(expected)}."
        )
    used_parts = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    if unused := sorted(name for name in info["unexpected_keys"] if name.rpartition(".")[0] in used_parts):
        raise ModelError(
            f"The weights of {model} do not fit its config.json: {len(unused)} tensors such as {unused[0]} have no "
            "place in the model that it describes, whose results would be others without them."
        )


def _eos_token_ids(config: EngineConfig, text_config: PreTrainedConfig) -> tuple[int, ...]:
    usual = getattr(text_config, "eos_token_id", None)
    return find_eos_token_ids(config.model, config.revision, text_config.vocab_size, usual)
