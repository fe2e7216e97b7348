"""All chosen experts of a layer in a few launches of Triton. Imported only where the device is a GPU."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.kernels.cuda.experts import Experts, SortedSlots, add_slots, multiply_by_experts, sort_slots
from engine.kernels.cuda.linear import Coding
from engine.weights.expert_stack import PackedStack, has_output_norm
from engine.weights.gathered_weight import GatheredWeight, own_part
from engine.weights.packed_weight import PackedWeight
from engine.weights.triton_weight import TritonWeight

__all__ = ["TritonExperts", "TritonStack", "triton_experts"]


def triton_experts(experts: nn.Module, up: PackedStack, down: PackedStack) -> "TritonExperts | None":
    """Returns the experts for Triton, or None where their weights are others, or a norm follows the last matrix."""
    are_packed = all(isinstance(own_part(weight), TritonWeight) for stack in (up, down) for weight in stack.weights)
    return TritonExperts(experts, up, down) if are_packed and not has_output_norm(experts) else None


class TritonExperts:
    """Experts with weights that are stored alike. Their module computes what lies between the matrices, for all rows at
    once."""

    def __init__(self, experts: nn.Module, up: PackedStack, down: PackedStack) -> None:
        """Takes the module for its gate, and the weights, each a `TritonWeight`, which stay where they are."""
        module: Any = experts
        self._between = module._apply_gate if module.has_gate else module.act_fn
        self._up, self._down = TritonStack(up.weights, up.own_biases), TritonStack(down.weights, down.own_biases)

    def run(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Runs the chosen experts [T, S] with their weights [T, S] on hidden_states [T, H]; returns [T, H].

        The bits are those of the experts one by one. Does not wait for the GPU.
        """
        num_experts = len(self._up.weights)
        by_expert = sort_slots(chosen, num_experts)
        inner = self._between(self._up.gathered(self._up.multiply(hidden_states, by_expert, is_sorted=False)))
        outputs = self._down.multiply(inner, by_expert, is_sorted=True)
        return self._down.gathered(add_slots(outputs, chosen, weights, num_experts))


class TritonStack:
    """One matrix of each expert or head, as the product takes them, or one rank's part of its columns."""

    def __init__(self, weights: Sequence[PackedWeight], biases: Tensor | None) -> None:
        """Takes weights of one shape, each a `TritonWeight` or gathered from one, and biases [E, N] of this rank's
        columns."""
        whole = weights[0]
        self._after = whole.after if isinstance(whole, GatheredWeight) else None
        self.weights = [cast(TritonWeight, own_part(each)) for each in weights]  # kept: products know addresses alone
        first = self.weights[0]
        addresses = torch.tensor([weight.rows.data_ptr() for weight in self.weights], device=first.device)
        biases = None if biases is None else biases.contiguous()
        num_out, num_in = first.shape[0], first.shape[1] + first.num_missing
        layout = (num_out, num_in, first.rows.stride(0), first.order, first.rows.dtype)
        self._experts = Experts(addresses, biases, *layout, _joined_coding(self.weights))

    def multiply(self, x: Tensor, by_expert: SortedSlots, is_sorted: bool) -> Tensor:
        """Multiplies rows by those of the matrices that were chosen for them; see `multiply_by_experts`. Returns this
        rank's columns."""
        return multiply_by_experts(self.weights[0].taken(x), self._experts, by_expert, is_sorted)

    def gathered(self, columns: Tensor) -> Tensor:
        """Returns the columns of all ranks beside each other."""
        return columns if self._after is None else self._after.run(columns)

    def multiply_each(self, x: Tensor) -> Tensor:
        """Multiplies rows x [E, T, K] by each its matrix; returns [E, T, N]. Does not wait for the GPU."""
        num_matrices, num_rows, _ = x.shape
        slots = torch.arange(num_matrices * num_rows, dtype=torch.int32, device=x.device)
        ends = torch.arange(1, num_matrices + 1, dtype=torch.int32, device=x.device) * num_rows
        by_matrix = SortedSlots(slots, ends, len(slots))
        return self.multiply(x.flatten(0, 1), by_matrix, is_sorted=True).view(num_matrices, num_rows, -1)


def _joined_coding(weights: Sequence[TritonWeight]) -> Coding | None:
    """Returns the coding of all experts, of which each weight gets its part in place of its own; None for numbers."""
    codings = [weight.coding for weight in weights if weight.coding is not None]
    if not codings:
        return None
    joined = codings[0]._replace(scales=torch.stack([each.scales for each in codings]))
    for number, weight in enumerate(weights):
        weight.coding = joined._replace(scales=joined.scales[number])
    return joined
