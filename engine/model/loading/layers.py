"""The layers of a model, which are proved to run over the paged cache and one after the other."""

import logging
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, UnsupportedModelError
from engine.mixers.functions import route_recurrent_functions
from engine.mixers.state import StateShape
from engine.model.compressed.replacement import check_compressed
from engine.model.context_limit import context_limit
from engine.model.kv_cache_dtype import kv_dtype_named
from engine.model.latent_attention import are_expanded_by, expand_latents, keep_latents
from engine.model.loading.known_layers import replace_known_layers
from engine.model.loading.placement import Placement
from engine.model.loading.preparation import only_errors_of
from engine.model.paging_proof import prove_paging
from engine.model.probe import ProbedLayers, probe
from engine.model.recurrent.replacement import replace_recurrent_layers
from engine.model.sparse_attention import check_sparse, is_sparse
from engine.model.tensor_parallel import check_heads

__all__ = ["prove_layers"]

logger = logging.getLogger(__name__)


def prove_layers(config: EngineConfig, module: PreTrainedModel, place: Placement) -> ProbedLayers:
    """Returns the attention calls and the shapes of the states of all layers, of latents where the model can run over
    these. Raises UnsupportedModelError unless it can run paged."""
    route_recurrent_functions(module)
    replace_recurrent_layers(module)
    replace_known_layers(module)
    is_expanded = bool(place.group.of_first(are_expanded_by(config.adapters)))
    replaced = {} if is_expanded else keep_latents(module, kv_dtype_named(config.kv_cache_dtype, place.dtype))
    if not replaced:
        return _proved(config, module, place)
    layers = None
    try:
        layers = _proved(config, module, place)
    except UnsupportedModelError as error:
        if is_sparse(module):
            raise
        logger.warning("keys and values of all heads are cached, not latents: %s", error)
    if not place.group.of_first(layers is not None):
        expand_latents(replaced)
        return _proved(config, module, place)
    assert layers is not None, "what the first rank has proved holds for all"
    return layers


def _proved(config: EngineConfig, module: PreTrainedModel, place: Placement) -> ProbedLayers:
    layers = probe(module, place.device)
    _check_states(config, layers.states, place.device)
    check_sparse(config.model, layers.calls, place.device)
    check_compressed(config.model, layers.calls, place.device)
    check_heads(config.model, layers.calls, place.group)
    if place.group.is_first:  # it holds for all
        with only_errors_of("transformers.integrations.hub_kernels"):  # it asks for packages that would not be used
            prove_paging(module, context_limit(module.config.get_text_config(decoder=True), layers.states))
    return layers


def _check_states(config: EngineConfig, states: Sequence[StateShape], device: torch.device) -> None:
    if states and device.type != "cpu":
        raise UnsupportedModelError(
            f"{config.model} has recurrent states, which are computed on the CPU only: use --device cpu."
        )
    if states and config.is_self_speculative:
        raise ConfigError(
            f"--draft-quantization {config.draft_quantization}: {config.model} has recurrent states, which its rounded "
            "weights would need copies of; leave it out."
        )
