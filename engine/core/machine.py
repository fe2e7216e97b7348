"""A machine's measured peaks, and the work of a model's step in bytes and operations: the two sides of the roofline
model, as plain values."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec


class Ceilings(msgspec.Struct, frozen=True, gc=False):
    """The machine's peaks of memory bandwidth and compute, measured with all threads when the model was loaded, and
    again when the engine rested."""

    read_bytes_per_s: float
    flops_per_s: float
    """Multiplications and additions per second of the fastest GEMM: torch's, or the one with quantized weights."""
    dtype: str = "float32"
    """Type of that GEMM: the model's, float32 on a CPU that does not multiply bfloat16, or the quantization."""
    reads_cache: bool = False
    """Whether as many bytes as the model has fit into the CPU's largest cache, so that this is what was read."""
    is_in_doubt: bool = False
    """Whether they were measured while the machine was busy with something else, so that they may be far too low."""

    @property
    def read_from(self) -> str:
        return "the processor's cache" if self.reads_cache else "memory"


Measure = Callable[[Callable[[], bool]], Ceilings | None]
"""Measures the machine's peaks; gives up, and returns None, soon after what it is given returns True."""


class AttentionSize(msgspec.Struct, frozen=True):
    """All attention layers with the same window, taken together."""

    window: int | None
    """Positions that a token attends to, its own included; None for all."""
    bytes_per_token: int
    """Bytes of the keys and values of one position."""
    flops_per_pair: int
    """Operations for one query token and one position that it attends to."""
    flops_per_scored_pair: int = 0
    """Operations for such a pair in layers where only tokens whose logits are needed are queries."""


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that a step reads, in bytes, and operations that it computes."""

    layer_bytes: int
    """Bytes of the weights of all layers, without experts."""
    layer_flops: int
    """Operations per token in all layers, those of its chosen experts included."""
    last_flops: int = 0
    """The part of `layer_flops` that only tokens whose logits are needed take: the last layer without its keys and
    values."""
    expert_bytes: int = 0
    """Bytes of the weights of all experts."""
    expert_share: float = 1.0
    """Share of the experts that one token chooses."""
    head_bytes: int
    head_flops: int
    """Operations of the head per token whose logits are needed."""
    attention: tuple[AttentionSize, ...]

    @property
    def weight_bytes(self) -> int:
        return self.layer_bytes + self.expert_bytes + self.head_bytes

    def experts_read(self, num_tokens: int) -> float:
        """Expected share of the experts that a step of `num_tokens` reads, if each token chooses its own at random; 0
        for a model without experts."""
        return 1 - (1 - self.expert_share) ** num_tokens if self.expert_bytes else 0.0

    def bytes_of(self, experts_read: float) -> float:
        """Bytes of weights that a step reads in all layers, with this share of the experts."""
        return self.layer_bytes + self.expert_bytes * experts_read


class Bound(StrEnum):
    """What limits a step that runs at the machine's peaks: compute or memory bandwidth."""

    COMPUTE = "compute"
    MEMORY = "memory"


class StepFloor(NamedTuple):
    """Shortest possible time of a step at the machine's peaks, and what limits it."""

    seconds: float
    bound: Bound
