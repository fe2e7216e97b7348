"""What a machine can do and what a model's step asks of it, in bytes and operations; plain values."""

from enum import StrEnum
from typing import NamedTuple

import msgspec


class Ceilings(msgspec.Struct, frozen=True):
    """How fast the machine was when the model was loaded, with all threads."""

    read_bytes_per_s: float
    flops_per_s: float
    """Multiplications and additions per second of the fastest matrix product: torch's, or that of quantized weights."""
    dtype: str = "float32"
    """Of that product: the model's, float32 on a CPU that does not multiply bfloat16, or the quantization."""


class AttentionSize(msgspec.Struct, frozen=True):
    """The attention layers that see equally far, together."""

    window: int | None
    """Positions that a token sees, its own included; None for all."""
    bytes_per_token: int
    """Keys and values of one position."""
    flops_per_pair: int
    """Of one query token and one position that it sees."""
    flops_per_scored_pair: int = 0
    """Likewise, of layers where only tokens whose logits are needed are queries."""


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a step has to read and to multiply."""

    layer_bytes: int
    """Weights of all layers without experts."""
    layer_flops: int
    """Per token, the experts that it chooses included."""
    last_flops: int = 0
    """Of these, what only tokens whose logits are needed take: the last layer but for keys and values."""
    expert_bytes: int = 0
    """Weights of all experts."""
    expert_share: float = 1.0
    """Of the experts, chosen by one token."""
    head_bytes: int
    head_flops: int
    """Per token whose logits are needed."""
    attention: tuple[AttentionSize, ...]

    @property
    def weight_bytes(self) -> int:
        return self.layer_bytes + self.expert_bytes + self.head_bytes

    def bytes_of(self, num_tokens: int) -> float:
        """Weights that so many tokens read: of experts, as many as tokens that choose at random touch."""
        return self.layer_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** num_tokens)


class Bound(StrEnum):
    """What a step would wait for if it ran at the machine's ceilings."""

    COMPUTE = "compute"
    MEMORY = "memory"


class StepFloor(NamedTuple):
    seconds: float
    bound: Bound
