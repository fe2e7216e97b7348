"""The weights of all experts of a layer, each packed for its matmul."""

from typing import cast

from torch import Tensor, nn

from engine.weights.gathered_weight import GatheredWeight, gathered, own_part
from engine.weights.packed_weight import PackedWeight
from engine.weights.packing_policy import Pack
from engine.weights.partition import Cut
from engine.weights.rank_group import ALONE, RankGroup

__all__ = ["PackedStack", "has_output_norm"]


class PackedStack:
    """One packed weight per expert, and the biases, taken out of the module that held them as parameters. All experts
    are cut alike."""

    def __init__(
        self,
        experts: nn.Module,
        is_transposed: bool,
        pack: Pack,
        name: str,
        cut: Cut | None = None,
        group: RankGroup = ALONE,
    ) -> None:
        stack = cast(Tensor, experts._parameters.pop(name)).detach()  # [E, N, K], or [E, K, N] when transposed
        if is_transposed:
            stack = stack.transpose(1, 2)
        self.weights = [_packed(weight, pack, cut, group) for weight in stack]
        biases: Tensor | None = experts._parameters.pop(f"{name}_bias", None)
        if biases is not None and cut is not None and cut.output_starts is None:
            biases = cut.own(biases.t()).t().contiguous()
        self.biases = None if biases is None else biases.detach().clone()  # [E, N], off the mapped checkpoint file

    @property
    def own_biases(self) -> Tensor | None:  # [E, own N]
        """The biases of this rank's part of the columns."""
        if self.biases is None or not isinstance(self.weights[0], GatheredWeight):
            return self.biases
        return self.weights[0].own_columns(self.biases)

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
        return sum(own_part(weight).shape.numel() for weight in self.weights)


def _packed(weight: Tensor, pack: Pack, cut: Cut | None, group: RankGroup) -> PackedWeight:
    return pack(weight) if cut is None else gathered(pack(cut.own(weight), num_columns=cut.num_columns), cut, group)


def has_output_norm(experts: nn.Module) -> bool:
    """Whether each expert's output is normed before it is weighed; older versions of transformers know no such norm."""
    return bool(getattr(experts, "has_post_expert_norm", False))
