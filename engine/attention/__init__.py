"""Paged attention: one signature, three backends (plain torch, C++ on CPUs, Triton on CUDA)."""

from typing import Protocol

import torch
from torch import Tensor

from engine.attention import cpu, reference
from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, AttentionParams, IndexCall
from engine.kernels import KernelInfo

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionParams", "LayerCache", "select_backend"]


class AttentionBackend(Protocol):
    """The interface of a backend module; `engine.attention.reference` documents shapes and meaning."""

    __name__: str

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        """Stores each token's key and value in its slot of the cache."""

    def paged_attention(
        self, query: Tensor, cache: LayerCache, metadata: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        """Causal attention of each query token over the cached context of its sequence."""

    def choose_slots(self, index: IndexCall, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Chooses the positions that each token attends to, where these are not all that it sees."""


def select_backend(device: torch.device, kernels: KernelInfo | None) -> AttentionBackend:
    """Returns the fastest backend for `device`; `kernels` is what `load_kernels()` returned."""
    if device.type == "cuda":
        import engine.attention.cuda as cuda  # it imports Triton, which no other device needs

        return cuda
    if device.type == "cpu" and kernels is not None:
        return cpu
    return reference
