"""The weights of all experts of a layer, each packed for its matmul."""

from typing import cast

from torch import Tensor, nn

from engine.weights.packing_policy import Pack

__all__ = ["PackedStack"]


class PackedStack:
    """One packed weight per expert, and the biases, taken out of the module that held them as parameters."""

    def __init__(self, experts: nn.Module, is_transposed: bool, pack: Pack, name: str) -> None:
        stack = cast(Tensor, experts._parameters.pop(name)).detach()  # [E, N, K], or [E, K, N] when transposed
        if is_transposed:
            stack = stack.transpose(1, 2)
        self.weights = [pack(weight) for weight in stack]
        biases = experts._parameters.pop(f"{name}_bias", None)
        self.biases = None if biases is None else biases.detach().clone()  # [E, N], off the mapped checkpoint file

    def __len__(self) -> int:
        return len(self.weights)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        return self.weights[expert].multiply(x, None if self.biases is None else self.biases[expert])

    @property
    def nbytes(self) -> int:
        biases = 0 if self.biases is None else self.biases.nbytes
        return biases + sum(weight.nbytes for weight in self.weights)

    @property
    def num_weights(self) -> int:
        return sum(weight.shape.numel() for weight in self.weights)
