"""The linear layers of a loaded model to which adapters can add, by the names that the checkpoint gives them.

Layers that were merged are named apart, each with its columns of the merged result, of which one of several ranks has
some.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.attention.kv_source import projected_heads
from engine.model.decoder_parts import AttentionParts, LatentParts, LayerParts, MixtureParts, MlpParts
from engine.model.fused_modules import FusedAttention, FusedMLP
from engine.model.fused_recurrent import FusedDeltaNet
from engine.model.kernel_forward import KernelForward
from engine.runner.forward import Forward
from engine.weights.gathered_weight import own_part
from engine.weights.linear_parts import LinearParts
from engine.weights.merged_rows import concatenated, gates_last, heads_by_kind, interleaved
from engine.weights.packed_weight import PackedWeight
from engine.weights.partition import Cut

if TYPE_CHECKING:
    from engine.weights.linear import PackedLinear

__all__ = ["AdapterTarget", "adapter_targets"]


class AdaptableLayer(Protocol):
    """A linear layer that can have adapters."""

    def adapt(self, number: int, columns: Tensor, down: PackedWeight, up: PackedWeight) -> None: ...

    def release(self, number: int) -> None: ...


class AdapterTarget(NamedTuple):
    """A linear layer of the checkpoint: some columns, or all, of a layer of the loaded model."""

    layer: AdaptableLayer
    columns: Tensor  # [own N], of the layer's part that this rank has
    shape: tuple[int, int]
    """Its output and input features, N and K, on all ranks together."""
    rows: Tensor | None = None  # [own N]
    """Which of its output features this rank has, if not all."""

    def own(self, matrix: Tensor) -> Tensor:
        """Returns the rank's rows of a matrix [N, ...]."""
        return matrix if self.rows is None else matrix[self.rows]


def _target_of(layer: AdaptableLayer, columns: Tensor, num_in: int, cut: Cut | None) -> AdapterTarget:
    """Returns the target with these columns of a layer, of which the rank has what `cut` says."""
    shape = len(columns), num_in
    if cut is None:
        return AdapterTarget(layer, columns, shape)
    rows, places = cut.places_of(columns)
    return AdapterTarget(layer, places, shape, rows)


def adapter_targets(forward: Forward, module: Any) -> dict[str, AdapterTarget]:
    """Returns the layers that `forward` runs, by name: those of the kernels, or those of `module`."""
    if isinstance(forward, KernelForward):
        return dict(_targets_of_kernels(forward))
    head = module.get_output_embeddings()
    return {name: each for name, each, layer in _targets_of(module, "", {}) if layer is not head}


class _KernelLinear:
    """A linear layer of the C++ decoder."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear

    def adapt(self, number: int, columns: Tensor, down: Any, up: Any) -> None:
        self._linear.adapt(number, columns, down.packed, up.packed, down.shape[0])

    def release(self, number: int) -> None:
        self._linear.release(number)


def _targets_of_kernels(forward: KernelForward) -> Iterator[tuple[str, AdapterTarget]]:
    linears = iter(forward.linears)
    for index, parts in enumerate(forward.parts.layers):
        for names, sizes, linear, join in _linears_of(parts):
            layer = _KernelLinear(next(linears))
            for name, columns in zip(names, _columns(join, sizes, len(names)), strict=True):
                yield f"{forward.parts.path}.{index}.{name}", _target_of(layer, columns, linear.in_features, linear.cut)
    if (inputs := forward.parts.layer_inputs) is not None:
        (name,), (num_out,), linear, _ = _whole(inputs.projection, "model.per_layer_model_projection")
        layer = _KernelLinear(next(linears))
        yield name, _target_of(layer, torch.arange(num_out), linear.in_features, linear.cut)


Join = Callable[[Sequence[Tensor]], Tensor]
_Linear = tuple[Sequence[str], Sequence[int], LinearParts, Join]


def _linears_of(layer: LayerParts) -> Iterator[_Linear]:
    """Yields each linear layer of the kernels, in the order of `KernelForward.linears`, with the names and output
    features of the layers that it is made of. A single name stands for a layer of the checkpoint that has them all."""
    attention, feed_forward = layer.attention, layer.after.feed_forward
    yield from _linears_of_latents(attention) if isinstance(attention, LatentParts) else _linears_of_heads(attention)
    yield _whole(layer.after.output, layer.after.output_name)
    yield from (
        _linears_of_mlp(feed_forward, layer.after.path) if isinstance(feed_forward, MlpParts) else _beside(feed_forward)
    )
    if (end := layer.after.end) is not None and end.gate is not None and end.projection is not None:
        yield _whole(end.gate, "per_layer_input_gate")
        yield _whole(end.projection, "per_layer_projection")


def _linears_of_heads(attention: AttentionParts) -> Iterator[_Linear]:
    heads = attention.projected_heads
    names, head_size = [f"{attention.path}.{each}" for each in attention.names], attention.head_size
    yield names, [each * head_size for each in heads], attention.query_key_value, _join_of(attention)


def _join_of(attention: AttentionParts) -> Join:
    if attention.are_in_turn:
        return functools.partial(heads_by_kind, head_size=attention.head_size)
    is_by_head = attention.gates == "of queries"
    return functools.partial(gates_last, head_size=attention.head_size) if is_by_head else concatenated


def _linears_of_latents(attention: LatentParts) -> Iterator[_Linear]:
    if attention.query_down is not None:
        yield _whole(attention.query_down, "self_attn.q_a_proj")
    yield _whole(attention.query, "self_attn.q_proj" if attention.query_down is None else "self_attn.q_b_proj")
    yield _whole(attention.latent, "self_attn.kv_a_proj_with_mqa")


def _linears_of_mlp(mlp: MlpParts, path: str) -> Iterator[_Linear]:
    names, sizes = [f"{path}.{each}" for each in mlp.names], _gate_columns(mlp.is_gated, mlp.gate_up.num_columns)
    yield names, sizes, mlp.gate_up, interleaved
    yield _whole(mlp.down, f"{path}.{mlp.down_name}")


def _beside(mixture: MixtureParts) -> Iterator[_Linear]:
    """Yields those of a mixture, all but its experts' and its router's."""
    if mixture.shared is not None:
        yield from _linears_of_mlp(mixture.shared, mixture.shared_path)
    if mixture.shared_gate is not None:
        yield _whole(mixture.shared_gate, f"{mixture.shared_path}_gate")


def _whole(linear: LinearParts, name: str) -> _Linear:
    return [name], [linear.num_columns], linear, concatenated


def _gate_columns(is_gated: bool, num_out: int) -> list[int]:
    return [num_out // 2] * 2 if is_gated else [num_out]


def _columns(join: Join, sizes: Sequence[int], num_layers: int) -> Sequence[Tensor]:
    """Returns where the outputs of layers of these sizes lie among those of the layer that joins them; of one layer
    that has them all, one after the other, where all lie."""
    numbers = torch.arange(sum(sizes)).split_with_sizes([*sizes])
    columns = join(numbers).argsort()
    return columns.split_with_sizes([*sizes]) if num_layers == len(sizes) else [columns]


def _targets_of(
    module: nn.Module, path: str, seen: dict[nn.Module, None]
) -> Iterator[tuple[str, AdapterTarget, nn.Module]]:
    """Yields the targets below a module whose name is `path`, each with its layer in the loaded model."""
    from engine.model.kernel_layer import KernelLayer  # with it come transformers' models
    from engine.weights.linear import PackedLinear

    for name, child in module._modules.items():
        if child is None or child in seen:
            continue
        seen[child] = None
        place = path if isinstance(module, KernelLayer) else f"{path}.{name}".lstrip(".")
        if not isinstance(child, PackedLinear):
            yield from _targets_of(child, place, seen)
        elif ".experts." not in place:  # their rows are some of a step's
            for own, target in _targets_in(module, name, child):
                yield f"{path}.{own}".lstrip("."), target, child


def _targets_in(parent: nn.Module, name: str, linear: "PackedLinear") -> Iterator[tuple[str, AdapterTarget]]:
    """Yields the layers of the checkpoint of which a linear layer was made, by their names in its parent."""
    names, sizes, join = _merged(parent, name, linear.num_columns)
    num_in = own_part(linear.packed).shape[1]
    for own, columns in zip(names, _columns(join, sizes, len(names)), strict=True):
        target = _target_of(linear, columns, num_in, linear.cut)
        yield own, target._replace(columns=target.columns.to(linear.packed.device))


def _merged(parent: nn.Module, name: str, num_out: int) -> tuple[Sequence[str], Sequence[int], Join]:
    """Returns the names and output features of the layers of which a fused module made this one."""
    if isinstance(parent, FusedAttention) and name == "qkv_proj":
        heads = projected_heads(parent.kv.values, parent.gates, *parent.heads_of_all)
        return parent.names, [each * parent.head_size for each in heads], parent.joined
    if isinstance(parent, FusedMLP) and name == "gate_up_proj":
        return parent.names, _gate_columns(parent.is_gated, num_out), interleaved
    if isinstance(parent, FusedDeltaNet) and name == "in_proj":
        return parent.names, parent.projection_sizes, parent.joined
    if isinstance(parent, FusedAttention):
        return (parent.out_name,), [num_out], concatenated
    own = parent.down_name if isinstance(parent, FusedMLP) else name
    return (own,), [num_out], concatenated
