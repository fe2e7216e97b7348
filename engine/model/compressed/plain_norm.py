"""RMSNorms without a weight, as modules that are fused as those with one are."""

from typing import Any

import torch
from torch import nn

__all__ = ["norm_without_weight"]


def norm_without_weight(norm: Any, size: int) -> nn.Module:
    """Returns a norm of `size` numbers that is of the kind of `norm`, with its epsilon; its weights are 1."""
    made: nn.Module = type(norm)(size, eps=norm.variance_epsilon)
    del made.weight
    made.weight = nn.Buffer(torch.ones(size, device=norm.weight.device), persistent=False)
    return made
