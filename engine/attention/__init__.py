"""Paged attention: one signature, three backends (plain torch, C++ on CPUs, FlashAttention on CUDA)."""

from typing import Protocol

import torch
from torch import Tensor

from engine.attention import cpu, reference
from engine.attention.metadata import AttentionMetadata
from engine.kernels import KernelInfo

__all__ = ["AttentionBackend", "AttentionMetadata", "select_backend"]


class AttentionBackend(Protocol):
    """The interface of a backend module; `engine.attention.reference` documents shapes and meaning."""

    __name__: str

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores each token's key and value in its slot of the caches."""

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of each query token over the cached context of its sequence."""


def select_backend(device: torch.device, kernels: KernelInfo | None) -> AttentionBackend:
    """Returns the fastest backend for `device`; `kernels` is what `load_kernels()` returned."""
    if device.type == "cuda":
        import engine.attention.cuda as cuda  # its imports take seconds, which no other device needs to spend

        return cuda
    if device.type == "cpu" and kernels is not None:
        return cpu
    return reference
