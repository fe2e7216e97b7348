"""Chooses how a model runs: as one call into C++ if it is known in all its parts, else by its own code.

That both compute the same is proved by bits at each load.
"""

import logging
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import AttentionBackend, cpu
from engine.attention.kv_cache import KVCache
from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.mixers.state import StateCache
from engine.model.decoder_parts import DecoderParts, RotaryParts
from engine.model.drafting.kernel_head import HeadParts, KernelHeadForward
from engine.model.drafting.mtp_head import MtpInput, join_parts
from engine.model.fused_modules import FusedNorm, Rotation
from engine.model.kernel_forward import KernelForward
from engine.model.kernel_layer import KernelDecoderLayer
from engine.model.known import causal_lm, code_fingerprint
from engine.model.known.layer_inputs import are_layer_inputs_known, has_layer_inputs, layer_inputs_parts
from engine.model.known.norms import norm_parts
from engine.runner.forward import Forward, HeadForward, HeadInput, TransformersForward, TransformersHeadForward
from engine.runner.model_inputs import build_inputs
from engine.weights.block_weight import BlockEmbedding
from engine.weights.gathered_embedding import GatheredEmbedding
from engine.weights.gathered_weight import own_part
from engine.weights.linear import PackedLinear
from engine.weights.linear_parts import linear_parts
from engine.weights.packed_weight import KernelWeight
from engine.weights.quantized_weight import KernelQuantizedWeight

__all__ = ["FAMILIES", "choose_forward", "choose_head_forward", "decoder_parts", "is_known"]

logger = logging.getLogger(__name__)

FAMILIES = (
    "afmoe",
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "llama4_text",
    "mellum",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "youtu",
)
"""Model types that run in the kernels as a whole, all but models with parts of their own: see docs/models.md."""

_NUM_TEXTS = 2  # by which two forward passes are compared


def choose_forward(
    module: PreTrainedModel, cache: KVCache, backend: AttentionBackend, states: StateCache | None = None
) -> Forward:
    """Returns the fastest forward pass for this model. Leaves the cache alone, which may hold blocks already."""
    plain = TransformersForward(module, cache, backend, states)
    if backend is not cpu:
        return plain
    if not is_known(module):
        _warn_if_expected(module, "a part of it is not known")
        return plain
    parts, small = decoder_parts(module), cache.like_it(_NUM_TEXTS)
    if _is_same(TransformersForward(module, small, backend, states), KernelForward(parts, small), small):
        return KernelForward(parts, cache)
    _warn_if_expected(module, "it computes something else")
    return plain


def choose_head_forward(
    module: PreTrainedModel, join: HeadInput, cache: KVCache, backend: AttentionBackend
) -> HeadForward:
    """Returns the fastest forward pass for this head, whose `module` of one layer reads what `join` makes."""
    parts = join_parts(join) if isinstance(join, MtpInput) else None
    if parts is not None and backend is cpu and is_known(module):
        forward = choose_forward(module, cache, backend)
        if isinstance(forward, KernelForward) and _is_embedding_plain(forward.parts):
            return KernelHeadForward(HeadParts(parts, forward.parts), cache)
    return TransformersHeadForward(module, join, cache, backend)


def _is_embedding_plain(parts: DecoderParts) -> bool:
    return parts.embedding.dtype != torch.uint8 and parts.embedding_scale is None


def _warn_if_expected(module: PreTrainedModel, reason: str) -> None:
    """Warns where a model does not run in the kernels whose family does, with the versions that are tested."""
    if module.config.model_type in FAMILIES:
        logger.warning(
            "steps take two to three times as long: %s of transformers %s does not run in the kernels, since %s",
            type(module).__name__,
            transformers.__version__,
            reason,
        )


def is_known(module: PreTrainedModel) -> bool:
    """Whether nothing but what `KernelForward` does runs when `module` is called."""
    decoder = cast(Any, causal_lm.decoder_of(module))
    if not causal_lm.is_causal_lm(module) or not causal_lm.is_decoder(decoder):
        return False
    embedding, layers, head = decoder.get_input_embeddings(), list(decoder.layers), module.get_output_embeddings()
    return (
        isinstance(head, PackedLinear)
        and isinstance(own_part(head.packed), KernelWeight | KernelQuantizedWeight)
        and _is_embedding_known(embedding)
        and (not has_layer_inputs(decoder) or are_layer_inputs_known(decoder))
        and all(_is_rotary_known(each) for each in {*causal_lm.rotary_embeddings(decoder)})
        and isinstance(causal_lm.final_norm(decoder), FusedNorm)
        and embedding.weight.dtype == head.packed.dtype
        and len(layers) == decoder.config.num_hidden_layers
        and all(isinstance(layer, KernelDecoderLayer) for layer in layers)
    )


def _is_embedding_known(embedding: Any) -> bool:
    is_plain = code_fingerprint.is_embedding(embedding) or isinstance(embedding, GatheredEmbedding)
    return is_plain or code_fingerprint.is_scaled_embedding(embedding)


def _is_rotary_known(rotary: Any) -> bool:
    kinds = (
        code_fingerprint.is_rotary_embedding,
        code_fingerprint.is_half_rotary_embedding,
        code_fingerprint.is_pair_rotary_embedding,
        code_fingerprint.is_rotary_embedding_by_type,
        code_fingerprint.is_complex_rotary_embedding,
    )
    return any(is_of_kind(rotary) for is_of_kind in kinds)


def decoder_parts(module: PreTrainedModel) -> DecoderParts:
    """Returns the parts of a known model."""
    decoder, head = cast(Any, causal_lm.decoder_of(module)), cast(Any, module.get_output_embeddings())
    embedding = decoder.get_input_embeddings()
    rotations, numbers = _rotations_of(decoder)
    layers = zip(decoder.layers, numbers, _sources_of(decoder.layers), strict=True)
    logits_factor, logits_divisor = causal_lm.logits_scale(module)
    return DecoderParts(
        _rows_of(embedding),
        rotations,
        tuple(msgspec.structs.replace(each.parts, rotation=number, source=source) for each, number, source in layers),
        norm_parts(cast(FusedNorm, causal_lm.final_norm(decoder))),
        linear_parts(head.packed, head.bias),
        embedding.gather if isinstance(embedding, GatheredEmbedding) else None,
        _embedding_scale(decoder),
        module.config.final_logit_softcapping if causal_lm.caps_logits(module) else None,
        logits_factor,
        logits_divisor,
        layer_inputs_parts(decoder) if has_layer_inputs(decoder) else None,
        causal_lm.hidden_divisor(module),
        causal_lm.path_of_layers(module),
    )


def _sources_of(layers: Sequence[Any]) -> list[int | None]:
    """Returns for each layer of a known decoder the one before it whose keys and values it takes; None if its own."""
    lenders: dict[str, int] = {}
    sources: list[int | None] = []
    for number, kv in enumerate(layer.kv for layer in layers):
        sources.append(lenders[kv.kind] if kv.values == "of another layer" else None)
        if kv.lends:
            lenders[kv.kind] = number
    return sources


def _embedding_scale(decoder: Any) -> float | None:
    factor = causal_lm.embedding_factor(decoder)
    return code_fingerprint.embedding_scale(decoder.get_input_embeddings()) if factor is None else factor


def _rotations_of(decoder: Any) -> tuple[tuple[RotaryParts, ...], list[int]]:
    """Returns the rotary embeddings of a known decoder, and the number of each layer's."""
    rotaries, num_layers = causal_lm.rotary_embeddings(decoder), len(decoder.layers)
    by_type = code_fingerprint.is_rotary_embedding_by_type(rotaries[0])
    prefixes = [f"{each}_" for each in decoder.config.layer_types[:num_layers]] if by_type else [""] * num_layers
    kinds = [*zip(rotaries, prefixes, (layer.rotation for layer in decoder.layers), strict=True)]
    known, dtype = [*dict.fromkeys(kinds)], decoder.layers[0].parts.attention.dtype
    return tuple(_rotary_parts(*each, dtype) for each in known), [known.index(each) for each in kinds]


def _rotary_parts(rotary: Any, prefix: str, rotation: Rotation, dtype: torch.dtype) -> RotaryParts:
    inv_freq = getattr(rotary, f"{prefix}inv_freq").to(torch.float32)
    scaling = code_fingerprint.scaling_of_tables(rotary, prefix)
    is_rounded = not code_fingerprint.stays_wide(rotary)
    scaling_of = rotation.scaling
    queries = () if scaling_of is None else (scaling_of.numbers(dtype), scaling_of.interval, scaling_of.shift)
    frequencies = inv_freq if rotation.is_applied else inv_freq[:0]
    is_polar = code_fingerprint.is_complex_rotary_embedding(rotary)
    return RotaryParts(frequencies, scaling, is_rounded, rotation.is_wide, is_polar, *queries)


def _rows_of(embedding: Any) -> Tensor:
    """Returns the embedding as the C++ operators take it: dense or in blocks."""
    weight = embedding.weight
    return weight.packed.packed if isinstance(weight, BlockEmbedding) else cast(Tensor, weight.detach())


@torch.inference_mode()
def _is_same(one: Forward, other: Forward, cache: KVCache) -> bool:
    """Whether both compute the same logits of two texts in one batch: of their first tokens, and of a next one."""
    lengths = (max(1, min(3, cache.block_size - 1)), 1)  # of _NUM_TEXTS texts
    first = _are_all_equal(one, other, cache, [0] * len(lengths), lengths)
    return first and (cache.block_size == 1 or _are_all_equal(one, other, cache, lengths, [1] * len(lengths)))


def _are_all_equal(one: Forward, other: Forward, cache: KVCache, starts: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether both compute the same logits of a step, in which each text has a block of its own."""
    requests = [
        ScheduledRequest("", [1] * length, start, (block,), SamplingParams(), [], [], True)
        for block, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    inputs = build_inputs(requests, cache.block_size, cache.layers[0].keys.device)
    return all(_are_equal(one(inputs, kept).logits, other(inputs, kept).logits) for kept in (None, [0]))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether both are exactly equal. NaN equals NaN: damaged weights do not mean that the code has changed."""
    return np.array_equal(one.float().numpy(), other.float().numpy(), equal_nan=True)
