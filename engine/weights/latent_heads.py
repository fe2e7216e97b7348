"""The up-projections of latent attention, which multiply queries and sums of latents, not the latents themselves.

The key of a head is W c, with the latent c of a token and the head's own matrix W. So its product with a query q is
that of W^T q with c, and the sum of weighed values V c is V times the sum of weighed latents: attention of all heads is
over one key, the latent and the rotated part, whose first numbers are the value (DeepSeek-V2, 2024).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from engine.checkpoint.stored_tensor import dense
from engine.weights.kernel_experts import ExpertStack
from engine.weights.packed_weight import KernelWeight, PackedWeight
from engine.weights.packing_policy import Pack

if TYPE_CHECKING:
    from engine.weights.triton_experts import TritonStack

__all__ = ["LatentHeads"]


class LatentHeads(nn.Module):
    """Replaces the linear layer that makes keys and values of all heads of a latent. It is packed as `pack` says; until
    then torch multiplies."""

    def __init__(self, weight: Tensor, num_heads: int, key_size: int) -> None:
        """`weight` has the rows of a head's key, without its rotated part, then those of its value, head by head."""
        super().__init__()
        self._num_heads, self._key_size = num_heads, key_size
        self.weight = nn.Parameter(dense(weight.detach()), requires_grad=False)  # [H * (key size + value size), rank]
        self._packed: tuple[_HeadWeights, _HeadWeights] | None = None

    def pack(self, pack: Pack) -> None:
        """Takes the weight out of its parameter."""
        self._packed = _HeadWeights(self._keys, pack), _HeadWeights(self._values, pack)
        del self.weight

    @property
    def weights(self) -> list[PackedWeight]:
        """The packed weights of all heads."""
        return [weight for stack in self._packed or () for weight in stack.weights]

    @property
    def value_weights(self) -> list[PackedWeight]:
        """Weights that multiply sums of latents."""
        return [*self._packed[1].weights] if self._packed else []

    @property
    def stacks(self) -> tuple[ExpertStack, ExpertStack] | None:
        """The matrices for queries and those for sums of latents, where the kernels have them."""
        keys, values = (each.stack for each in self._packed) if self._packed else (None, None)
        return None if keys is None or values is None else (keys, values)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def absorb(self, query: Tensor) -> Tensor:
        """Returns queries [T, H, key size + rotated] as they meet latents: [T, H, rank + rotated]."""
        heads = query.transpose(0, 1)
        plain, rotated = heads[..., : self._key_size], heads[..., self._key_size :]
        absorbed = self._packed[0].multiply(plain) if self._packed else plain @ self._keys.transpose(1, 2)
        return torch.cat((absorbed, rotated), dim=-1).transpose(0, 1)

    def expand(self, sums: Tensor) -> Tensor:
        """Returns sums of latents [T, H, rank] as those of values [T, H, value size]."""
        heads = sums.transpose(0, 1)
        expanded = self._packed[1].multiply(heads) if self._packed else heads @ self._values.transpose(1, 2)
        return expanded.transpose(0, 1)

    @property
    def _keys(self) -> Tensor:  # [H, rank, key size]
        return self._by_head[:, : self._key_size].transpose(1, 2)

    @property
    def _values(self) -> Tensor:  # [H, value size, rank]
        return self._by_head[:, self._key_size :]

    @property
    def _by_head(self) -> Tensor:  # [H, key size + value size, rank]
        return self.weight.view(self._num_heads, -1, self.weight.shape[-1])


class _HeadWeights:
    """A matrix of each head, all of one shape [N, K]; all are one call into C++ or Triton where these have them."""

    def __init__(self, weights: Tensor, pack: Pack) -> None:  # [H, N, K]
        contiguous = (weight.clone(memory_format=torch.contiguous_format) for weight in weights)
        self.weights: Sequence[PackedWeight] = [*map(pack, contiguous)]  # off the mapped checkpoint file
        self.stack: ExpertStack | None = None
        if all(isinstance(weight, KernelWeight) for weight in self.weights):
            packed = tuple(cast(KernelWeight, weight).packed for weight in self.weights)
            self.stack = ExpertStack(packed, None, weights.shape[1], bits=0)
        self._kernel: Any = self._in_triton() if self.stack is None else self.stack.bound()

    def _in_triton(self) -> "TritonStack | None":
        if self.weights[0].device.type != "cuda":
            return None
        from engine.weights.triton_experts import TritonStack  # CPU builds of torch bring no Triton

        return TritonStack(self.weights, None)

    def multiply(self, x: Tensor) -> Tensor:  # [H, T, K] -> [H, T, N]
        if self._kernel is not None:
            return cast(Tensor, self._kernel.multiply_each(x))
        products = [weight.multiply(rows, None) for weight, rows in zip(self.weights, x, strict=True)]
        return torch.stack(products)
