"""The work of a loaded model's steps: the bytes that they read, and the operations that they do."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention.kv_cache import LayerShape, VectorShape
from engine.attention.metadata import AnyIndexCall
from engine.attention.registry import AttentionCall
from engine.core.machine import AttentionSize, ModelSize
from engine.model.kernel_layer import KernelDecoderLayer
from engine.model.known import causal_lm
from engine.model.probe import layer_shape
from engine.weights.gathered_weight import own_part
from engine.weights.latent_heads import LatentHeads
from engine.weights.linear import PackedLinear
from engine.weights.moe import PackedExperts, PackedLlama4Experts, RouterWeight
from engine.weights.packed_weight import PackedWeight

__all__ = ["expert_share", "size_of"]

_NUM_CHOSEN = ("num_experts_per_tok", "top_k_experts")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

Weight = PackedWeight | Tensor


def size_of(module: PreTrainedModel, calls: Iterable[AttentionCall], kv_dtype: torch.dtype) -> ModelSize:
    """Returns the size of a packed module; `calls` are those of its attention layers, over a cache of `kv_dtype`."""
    head = module.get_output_embeddings()
    layers: list[Weight] = [m.packed for m in module.modules() if isinstance(m, PackedLinear) and m is not head]
    layers += [w.packed for m in module.modules() for w in vars(m).values() if isinstance(w, RouterWeight)]
    layers += [w for m in module.modules() if isinstance(m, LatentHeads) for w in m.weights]
    layers += [p for p in _unpacked(module, head) if p.dim() == 2]
    head_weights: list[Weight] = [head.packed] if isinstance(head, PackedLinear) else list(head.parameters())
    experts = [m for m in module.modules() if isinstance(m, PackedExperts | PackedLlama4Experts)]
    stacks = [p for p in _unpacked(module, head) if p.dim() > 2]  # weights of experts whose formula is not known
    share, last = expert_share(module.config.get_text_config(decoder=True)), _last_layer(module)
    num_in_experts = sum(m.num_weights for m in experts) + _num_weights(stacks)
    return ModelSize(
        layer_bytes=sum(w.nbytes for w in layers),
        layer_flops=int(2 * (_num_weights(layers) + share * num_in_experts)),
        last_flops=_flops_after_attention(last, share) if last else 0,
        expert_bytes=sum(m.nbytes for m in (*experts, *stacks)),
        expert_share=share,
        head_bytes=sum(w.nbytes for w in head_weights),
        head_flops=2 * _num_weights(head_weights),
        attention=_attention_sizes(calls, last, kv_dtype),
    )


def _flops_after_attention(layer: KernelDecoderLayer, share: float) -> int:
    return int(2 * (_num_weights(layer.weights_after_attention) + share * layer.num_expert_weights))


def _num_weights(weights: Sequence[Weight]) -> int:
    return sum(_numbers_of(weight) for weight in weights)


def _numbers_of(weight: Weight) -> int:
    return (weight if isinstance(weight, Tensor) else own_part(weight)).shape.numel()


def _unpacked(module: nn.Module, head: nn.Module) -> list[Tensor]:
    """Returns parameters that torch multiplies by, unpacked ones of two or more dimensions; no embeddings, and no
    convolutions, whose few numbers do not count."""
    owners = (m for m in module.modules() if m is not head and not isinstance(m, nn.Embedding | nn.Conv1d))
    return [p for owner in owners for p in owner.parameters(recurse=False) if p.dim() >= 2]


def expert_share(text_config: PreTrainedConfig) -> float:
    """Returns the share of a layer's experts that one token is routed to.

    That is one expert where the configuration does not say how many, and 1.0 for a model without experts.
    """
    total = _number(text_config, _NUM_EXPERTS) or 1.0
    return min(1.0, (_number(text_config, _NUM_CHOSEN) or 1.0) / total)


def _number(text_config: PreTrainedConfig, names: Sequence[str]) -> float | None:
    """Returns the first of these settings that the configuration has; the mean where it has one per layer."""
    value = next((value for name in names if (value := getattr(text_config, name, None))), None)
    return fmean(value) if isinstance(value, list | tuple) else value


def _last_layer(module: PreTrainedModel) -> KernelDecoderLayer | None:
    """Returns the last layer if kernels run all: for tokens without logits, they compute its keys and values only."""
    layers: Sequence[nn.Module] = getattr(causal_lm.decoder_of(module), "layers", ())
    known = [layer for layer in layers if isinstance(layer, KernelDecoderLayer)]
    return known[-1] if known and len(known) == len(layers) else None


def _attention_sizes(
    calls: Iterable[AttentionCall], last: KernelDecoderLayer | None, kv_dtype: torch.dtype
) -> tuple[AttentionSize, ...]:
    num_bytes, flops, scored_flops = Counter[int | None](), Counter[int | None](), Counter[int | None]()
    for call in calls:
        shape, sizes = layer_shape(call), call.key.shape[2] + call.value.shape[2]
        is_last = last is not None and call.layer == last.index
        for window, ratio in _attended(call):
            num_bytes[window] += shape.bytes_per_row(kv_dtype) // ratio
            (scored_flops if is_last else flops)[window] += 2 * call.query.shape[1] * sizes // ratio
        for index, key, ratio in _index_keys(call, shape):  # which are read of all positions
            num_bytes[None] += key.bytes_per_token // ratio
            flops[None] += 2 * index.query.shape[1] * key.size // ratio
    return tuple(AttentionSize(window, num_bytes[window], flops[window], scored_flops[window]) for window in num_bytes)


def _attended(call: AttentionCall) -> list[tuple[int | None, int]]:
    """Returns of how many positions keys are read, None for all, and how many positions one key stands for."""
    compressed = call.compressed
    if compressed is None:
        return [(call.sparse.num_chosen if call.sparse else call.params.sliding_window, 1)]
    most = None if compressed.choice is None else compressed.choice.num_chosen * compressed.ratio
    return [(compressed.window, 1), (most, compressed.ratio)]


def _index_keys(call: AttentionCall, shape: LayerShape) -> list[tuple[AnyIndexCall, VectorShape, int]]:
    """Returns what decides, the shape of its keys, and how many positions one key stands for, if the layer chooses."""
    if call.sparse and shape.index:
        return [(call.sparse, shape.index, 1)]
    compressed = call.compressed
    if compressed and compressed.choice and shape.compressed and shape.compressed.index:
        return [(compressed.choice, shape.compressed.index, compressed.ratio)]
    return []
