"""Makes every matmul of a model batch invariant: a row's result does not depend on the other rows.

`prepare_linears` swaps a model's linear layers, experts and routers in place, and reports the parameters that it could
not convert.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.checkpoint.stored_tensor import StoredTensor
from engine.weights.adapters import AdaptedWeight
from engine.weights.block_weight import BlockEmbedding, BlockWeight, keep_blocks
from engine.weights.gathered_weight import GatheredWeight, gathered, own_part
from engine.weights.latent_heads import LatentHeads
from engine.weights.module_replacement import has_hooks
from engine.weights.moe import PackedExperts, PackedLlama4Experts, is_experts, is_router, pack_experts, pack_router
from engine.weights.packed_weight import PackedWeight, WeightHandle, multiply_rows
from engine.weights.packing_policy import Pack, packing_for
from engine.weights.partition import Cut, even_cut
from engine.weights.rank_group import ALONE, RankGroup
from engine.weights.segment_sums import SegmentSums

__all__ = ["LinearReport", "PackedLinear", "is_linear", "prepare_linears"]

_NO_MATRICES = ("A_log", "e_score_correction_bias", "position_bias", "index_kpool_compress_ape")


class PackedLinear(nn.Module):
    """Replaces nn.Linear, and transformers' Conv1D, whose weight is transposed."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None, cut: Cut | None = None) -> None:
        """`cut` says which part of a layer this is, if it is one rank's."""
        super().__init__()
        self.packed: PackedWeight = packed
        self.cut = cut
        self.out_features, self.in_features = packed.shape
        self.bias = bias  # [N]

    @property
    def weight(self) -> WeightHandle:
        return WeightHandle(self.packed)

    @property
    def num_columns(self) -> int:
        """Output features of the layer on all ranks together."""
        return self.out_features if self.cut is None else self.cut.num_columns

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def adapt(self, number: int, columns: Tensor, down: PackedWeight, up: PackedWeight) -> None:
        """Has an adapter add to these columns, of one rank's part of a layer its own: see `AdaptedWeight.adapt`."""
        own = own_part(self.packed)
        if not isinstance(own, AdaptedWeight):
            own = AdaptedWeight(own)
            if isinstance(self.packed, GatheredWeight):
                self.packed.own = own  # which multiplies between both gathers
            else:
                self.packed = own
        own.adapt(number, columns, down, up)

    def release(self, number: int) -> None:
        """Forgets the adapter of this number."""
        own = own_part(self.packed)
        if isinstance(own, AdaptedWeight):
            own.release(number)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return multiply_rows(self.packed, x, self.bias)

    def in_segments(self, x: Tensor) -> Tensor | SegmentSums:  # [T, K] -> [T, N]
        """Multiplies as `forward` does, but a product whose segments are summed apart is left for the caller to add."""
        multiply = getattr(self.packed, "multiply_in_segments", self.packed.multiply)
        return cast("Tensor | SegmentSums", multiply(x, self.bias))

    def extra_repr(self) -> str:
        kind = type(own_part(self.packed)).__name__
        return f"in_features={self.in_features}, out_features={self.out_features}, packed={kind}"


Packed = PackedLinear | PackedExperts | PackedLlama4Experts


@dataclass(frozen=True, slots=True)
class LinearReport:
    """A report of what `prepare_linears` did to a model."""

    num_linears: int
    num_experts: int  # layers of experts, each with all its experts
    num_routers: int
    packed_bytes: int  # held by all of these now, and by embeddings in blocks
    unconverted: tuple[str, ...]  # matrices left to torch: with any here, batch invariance is not guaranteed
    has_rounded_rows: bool  # whether a weight rounds the rows that it multiplies because `rounds_rows` said so


def prepare_linears(
    model: nn.Module,
    kernels_available: bool,
    quantization: str = "none",
    group: RankGroup = ALONE,
    cuts: Mapping[nn.Module, Cut] = MappingProxyType({}),
    rounds_rows: bool = False,
) -> LinearReport:
    """Swaps the linear layers of `model` in place, one after the other, so that memory grows by one layer at most.

    A weight shared with an embedding is copied: the embedding keeps its rows, the linear layer gets its own. Only a
    weight that stays in blocks is shared. One of several ranks gets its part of each layer: as `cuts` have it, else an
    even part of the columns, which are gathered. With `rounds_rows`, weights in the blocks of GGUF round rows.
    """
    is_on_gpu = any(parameter.device.type == "cuda" for parameter in model.parameters())
    packing = packing_for(quantization, kernels_available, is_on_gpu, rounds_rows)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    head_weight = None if head is None else head._parameters.get("weight")

    def pack(module: nn.Module) -> Packed:
        return _pack_module(module, packing.head if module is head else packing.layers, group, cuts.get(module))

    swapped = _swap_modules(model, pack)
    packed_head = swapped.get(head) if head is not None else None
    shared = {id(head_weight): packed_head.packed} if isinstance(packed_head, PackedLinear) else {}
    embedding_bytes = [_pack_embedding(each, shared, kernels_available) for each in _stored_embeddings(model)]
    router_bytes = [pack_router(module, packing.routers) for module in model.modules() if _is_router(module)]
    latent_heads = [module for module in model.modules() if isinstance(module, LatentHeads)]
    for each in latent_heads:
        each.pack(packing.routers)
    linears = [module for module in swapped.values() if isinstance(module, PackedLinear)]
    return LinearReport(
        num_linears=len(linears),
        num_experts=len(swapped) - len(linears),
        num_routers=len(router_bytes),
        packed_bytes=sum(each.nbytes for each in (*swapped.values(), *latent_heads))
        + sum(embedding_bytes)
        + sum(router_bytes),
        unconverted=tuple(_unconverted(model)),
        has_rounded_rows=any(getattr(own_part(each), "rounds_rows", False) for each in _weights_of(swapped.values())),
    )


def _swap_modules(model: nn.Module, pack: Callable[[nn.Module], Packed]) -> dict[nn.Module, Packed]:
    """Puts what `pack` makes of linear layers and experts in the places of these; returns it, by what was there."""
    swapped: dict[nn.Module, Packed] = {}
    for parent, name, child in list(_children(model)):
        if child not in swapped:
            if not is_experts(child) and not is_linear(child):
                continue
            swapped[child] = pack(child)
        setattr(parent, name, swapped[child])
    return swapped


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child


def is_linear(module: nn.Module) -> bool:
    """Whether the module computes exactly F.linear: a subclass may change that, and so may a hook."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward) and not has_hooks(module)


def _weights_of(modules: Iterable[Packed]) -> Iterator[PackedWeight]:
    for module in modules:
        yield from (module.packed,) if isinstance(module, PackedLinear) else (*module.up.weights, *module.down.weights)


def _is_router(module: nn.Module) -> bool:
    return not isinstance(module, nn.Embedding) and is_router(module) and not has_hooks(module)


def _pack_module(module: nn.Module, pack: Pack, group: RankGroup, cut: Cut | None) -> Packed:
    """Returns the module's replacement; removes the weights from the module itself, which others may still hold."""
    if is_experts(module):
        return pack_experts(module, pack, group)
    weight, bias = cast(Tensor, module._parameters.pop("weight")).detach(), cast("Tensor | None", module.bias)
    weight = weight.t() if isinstance(module, Conv1D) else weight
    cut = cut or even_cut(len(weight), group)
    if cut is not None:
        weight = cut.own(weight)
        bias = cut.own(bias) if bias is not None and cut.output_starts is None else bias
    packed = gathered(pack(weight, num_columns=None if cut is None else cut.num_columns), cut, group)
    return PackedLinear(packed, None if bias is None else bias.detach().clone(), cut)  # off the mapped checkpoint file


def _stored_embeddings(model: nn.Module) -> Iterator[nn.Embedding]:
    for module in model.modules():
        if isinstance(module, nn.Embedding) and isinstance(module._parameters.get("weight"), StoredTensor):
            yield module


def _pack_embedding(embedding: nn.Embedding, shared: Mapping[int, PackedWeight], kernels_available: bool) -> int:
    """Keeps the embedding's rows in blocks, in a weight of `shared` where that is made of the same one, or makes them
    dense; returns the bytes that it holds beside parameters and `shared`."""
    weight = cast(StoredTensor, embedding._parameters.pop("weight"))
    packed = shared.get(id(weight))
    if not isinstance(packed, BlockWeight):
        packed = keep_blocks(weight) if kernels_available and embedding.max_norm is None else None
    if packed is None:
        embedding.weight = nn.Parameter(weight.expanded(), requires_grad=False)
        return 0
    cast(Any, embedding).weight = BlockEmbedding(packed)
    return 0 if packed in shared.values() else packed.nbytes


def _unconverted(model: nn.Module) -> Iterator[str]:
    """Yields the names of parameters that torch may still multiply by.

    Embeddings are only looked up, rates of decay (A_log), biases of a router or of positions and an indexer's gates of
    positions are no matrix, and models whose convolutions over tokens are run by torch are not served at all.
    """
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.Conv1d):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and name not in _NO_MATRICES:
                yield f"{module_name}.{name}".lstrip(".")
